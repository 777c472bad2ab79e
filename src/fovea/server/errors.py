"""Every failure as OpenAI's error body, with the field that caused it."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from fovea.api import schema
from fovea.api.responses import error_body
from fovea.core.errors import EngineError, FoveaError, InvalidRequest, NotFound, Overloaded

log = logging.getLogger("fovea.server")
UNION_TAGS = {"text", "image_url"}


class MethodNotAllowed(InvalidRequest):
    status = 405
    default_code = "method_not_allowed"


def response(error: FoveaError) -> JSONResponse:
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 503:
        headers["Retry-After"] = "5"
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def install(app: FastAPI) -> None:
    """Handlers for our errors, for pydantic's, for unknown routes, and for defects."""

    async def known(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, FoveaError)
        return response(error)

    async def malformed(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return response(explain(error.errors(), _fields_of(request)))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return response(NotFound(f"there is no {request.url.path} here", code="unknown_url"))
        if error.status_code == 405:
            answer = response(MethodNotAllowed(f"{request.method} is not accepted at {request.url.path}"))
            answer.headers.update(error.headers or {})
            return answer
        return response(InvalidRequest(str(error.detail)))

    async def defect(_: Request, error: Exception) -> JSONResponse:
        log.error("a request failed", exc_info=error)
        return response(EngineError("the server failed on this request; see its log"))

    app.add_exception_handler(FoveaError, known)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, defect)


def explain(problems: Sequence[Any], fields: tuple[str, ...]) -> InvalidRequest:
    """The most telling of pydantic's complaints, as one sentence about one field."""
    first: dict[str, Any] = max(problems, key=lambda problem: len(problem["loc"]))
    for problem in problems:
        if problem["type"] in ("extra_forbidden", "json_invalid", "missing"):
            first = problem
            break
    path = _path(first["loc"])
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "syntax error")
        return InvalidRequest(f"the body is not JSON: {reason}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return _unknown_field(path, fields)
    if first["type"] == "missing":
        return InvalidRequest(f"{path or 'the body'} is required", param=path or None, code="missing_field")
    got = _shorten(first.get("input"))
    message = first["msg"].removeprefix("Value error, ")
    return InvalidRequest(
        f"{path or 'the body'}: {message[:1].lower() + message[1:]}, got {got}", param=path or None
    )


def _unknown_field(path: str, fields: tuple[str, ...]) -> InvalidRequest:
    name = path.rpartition(".")[2]
    if name in schema.UNSUPPORTED:
        return InvalidRequest(
            f"{path}: {schema.UNSUPPORTED[name]} by this server", param=path, code="unsupported_field"
        )
    near = difflib.get_close_matches(name, fields, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InvalidRequest(f"unknown field {path!r}{hint}", param=path, code="unknown_field")


def _path(location: tuple[Any, ...]) -> str:
    """("body", "messages", 0, "content", "list[...]", 1, "url") is messages[0].content[1].url."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part == "body" or (path.endswith("]") and part in UNION_TAGS) or _is_type_name(part):
            continue
        else:
            path += f".{part}" if path else part
    return path


def _is_type_name(part: str) -> bool:
    """Pydantic names the branch of a union in the path; no field of ours looks like that."""
    return part in ("str", "int", "constrained-str") or "[" in part


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _fields_of(request: Request) -> tuple[str, ...]:
    path = request.url.path
    model: type[schema.Wire] = schema.ChatRequest
    if path.endswith("/tokenize"):
        model = schema.TokenizeRequest
    elif path.endswith("/v1/completions"):
        model = schema.CompletionRequest
    nested = (
        *schema.ChatMessage.model_fields,
        *schema.ImageURL.model_fields,
        *schema.StreamOptions.model_fields,
    )
    return (*model.model_fields, *nested)
