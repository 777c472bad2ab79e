"""Responses in the OpenAPI description that FastAPI does not derive from the routes: errors and streams."""

from __future__ import annotations

from typing import Any

from fovea.api.response_models import ErrorEnvelope

_TEXTS: dict[int | str, str] = {
    400: "A field, an image or a combination of fields is not accepted. `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The server's settings or the key do not allow this.",
    404: "The model, image or cache does not exist.",
    408: "The request's own timeout ran out.",
    413: "The body is too large.",
    429: "Too many requests run or wait, or the key is over its limit. Retry-After says when to try again.",
    500: "The server has a defect. Its log has the details.",
    503: "The server is still loading its model, or is shutting down.",
    # FastAPI would otherwise declare a status 422, which no route here sends.
    "4XX": "The request is refused for another reason.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorEnvelope, "description": text} for status, text in _TEXTS.items()
}
GENERATES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer. With `stream: true` server-sent events, of which the last is [DONE].",
        "content": {"text/event-stream": {}},
    },
    **ERRORS,
}
NAMED = {status: ERRORS[status] for status in (401, 404, 429, "4XX")}
