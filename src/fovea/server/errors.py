"""Error handlers: every failure becomes OpenAI's error body, which names the field that caused it."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from fovea.api.bodies.errors import DEFECT, error_body, error_headers
from fovea.api.explain import explain, shorten
from fovea.core.errors import DeadlineExceeded, EngineError, Forbidden, FoveaError, InvalidRequest, NotFound
from fovea.http.refusals import MethodNotAllowed
from fovea.observe.metrics import Metrics
from fovea.server.clients import Caller
from fovea.server.json_answers import OneLineResponse

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
log = logging.getLogger("fovea.server")


def refusal(
    error: FoveaError, metrics: Metrics, path: str = "", caller: Caller | None = None
) -> JSONResponse:
    """The response to an error, which is counted in the metrics. path, caller: see `response`."""
    metrics.count_refusal(error.code)
    return response(error, path, caller)


def response(error: FoveaError, path: str = "", caller: Caller | None = None) -> JSONResponse:
    """The response to an error, with the headers Retry-After and WWW-Authenticate where they apply.

    path: of the request. Clients of Anthropic's API expect a type beside the error.
    caller: tells its usage if the engine has worked on the request; None: it has not.
    """
    kind = {"type": "error"} if path.startswith("/v1/messages") else {}
    usage = {"usage": _usage(caller)} if caller is not None and caller.prompt_tokens else {}
    body = {**kind, **error_body(error), **usage}
    return OneLineResponse(body, status_code=error.status, headers=error_headers(error))


def _usage(caller: Caller) -> dict[str, int]:
    """The tokens of a request that its deadline has ended, for gateways that bill it."""
    prompt, completion = caller.prompt_tokens, caller.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _methods(request: Request) -> set[str]:
    """The methods that are accepted at the path of a request."""
    routes = request.app.router.routes
    return {
        method
        for method in METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    }


def install_handlers(app: FastAPI) -> None:
    """Add handlers for Fovea's errors, for pydantic's, for unknown routes and methods, and for defects."""

    def respond(request: Request, error: FoveaError) -> JSONResponse:
        caller = request.state.caller if isinstance(error, DeadlineExceeded) else None
        return refusal(error, request.app.state.fovea.metrics, request.url.path, caller)

    async def on_fovea_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, FoveaError)
        if error.status == 500:  # its message is not always sent
            log.error("a request failed: %s", error.message)
        return respond(request, error)

    async def on_invalid_body(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return respond(request, explain(error.errors()))

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return respond(
                request, NotFound(f"there is no route {shorten(request.url.path)}", code="unknown_url")
            )
        if error.status_code == 405:
            answer = respond(
                request, MethodNotAllowed(f"{request.method} is not accepted at {shorten(request.url.path)}")
            )
            answer.headers["allow"] = ", ".join(sorted(_methods(request)))
            return answer
        return respond(request, InvalidRequest(f"the request is not accepted: {shorten(error.detail)}"))

    async def on_defect(request: Request, error: Exception) -> JSONResponse:
        log.error("a request failed", exc_info=error)
        return respond(request, EngineError(DEFECT))

    app.add_exception_handler(FoveaError, on_fovea_error)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_defect)


async def on_forbidden(request: Request, error: Exception) -> JSONResponse:
    """Answer like any other error, and leave its code for the middleware, which sees only the status."""
    assert isinstance(error, Forbidden)
    request.scope["state"]["forbidden"] = error.code
    return refusal(error, request.app.state.fovea.metrics)
