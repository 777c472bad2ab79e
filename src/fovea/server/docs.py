"""What the OpenAPI description says about failures, the same for every route."""

from __future__ import annotations

from typing import Any

from fovea.api.schema import ErrorEnvelope

_TEXTS = {
    400: "a field, an image or a combination is not accepted; `param` names it",
    401: "an API key is missing or wrong",
    403: "a URL or path that this server does not fetch",
    404: "no such model",
    408: "the request's own timeout ran out",
    413: "the body is too large",
    429: "too many requests; see Retry-After",
    500: "a defect of the server",
    503: "still loading, or shutting down",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorEnvelope, "description": text} for status, text in _TEXTS.items()
}
