"""What the OpenAPI description says about answers beyond their fields: every failure, and streams."""

from __future__ import annotations

from typing import Any

from fovea.api.response_models import ErrorEnvelope

_TEXTS: dict[int | str, str] = {
    400: "a field, an image or a combination is not accepted; `param` names it",
    401: "an API key is missing or wrong",
    403: "a URL or path that this server does not fetch",
    404: "no such model",
    408: "the request's own timeout ran out",
    413: "the body is too large",
    429: "too many requests; see Retry-After",
    500: "a defect of the server",
    503: "still loading, or shutting down",
    # Declared, because FastAPI would else promise a 422 of its own, which no route here answers with.
    "4XX": "any other refusal",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorEnvelope, "description": text} for status, text in _TEXTS.items()
}
GENERATES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answer; with `stream: true` as server-sent events, the last of which is [DONE]",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    **ERRORS,
}
NAMED = {status: ERRORS[status] for status in (401, 404, "4XX")}
