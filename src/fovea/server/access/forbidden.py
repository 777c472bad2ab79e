"""The response to an error with status 403, whose reason the audit log needs."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import JSONResponse

from fovea.core.errors import Forbidden
from fovea.server.errors import refusal


async def on_forbidden(request: Request, error: Exception) -> JSONResponse:
    """Answer like any other error, and leave its code for the middleware, which sees only the status."""
    assert isinstance(error, Forbidden)
    request.scope["state"]["forbidden"] = error.code
    return refusal(error, request.app.state.fovea.metrics)
