"""Errors of backends, and all errors in the forms of the two APIs."""

from __future__ import annotations

import json
from typing import Any

from fovea.api.errors import LONGEST_MESSAGE, LONGEST_PARAM, clip, error_body
from fovea.core.errors import FoveaError, NotFound

OPENAI_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}
"""Type of an error by HTTP status. Others: invalid_request_error below 500, and server_error."""
ANTHROPIC_KINDS = OPENAI_KINDS | {413: "request_too_large", 503: "overloaded_error", 529: "overloaded_error"}
"""Anthropic's types. Others: invalid_request_error below 500, and api_error."""


MOST_LEVELS = 100
"""Levels of nesting that a backend's answer may have. Writing deeper ones could exceed Python's stack."""


class BackendError(FoveaError):
    """A backend refused a request or failed, or it answered something that cannot be translated.

    status: HTTP status of the backend's answer; 502 if its status was no error.
    """

    status = 502
    default_code = "bad_backend_answer"

    @classmethod
    def of(cls, status: int, body: Any) -> BackendError:
        """The error that a backend's answer describes, in one of the forms that engines have.

        OpenAI's `{"error": {...}}`, `{"error": "text"}`, and a body that is the error itself.
        status: HTTP status; 200: unknown, as within a stream.
        """
        fields: Any = body.get("error", body) if isinstance(body, dict) else body
        if isinstance(fields, str):
            fields = {"message": fields}
        fields = fields if isinstance(fields, dict) else {}
        message, param, code = (fields.get(name) for name in ("message", "param", "code"))
        if not isinstance(message, str) or not message:
            message = f"the backend answered with an error that has no message (HTTP status {status})"
        error = cls(
            clip(valid_text(message), LONGEST_MESSAGE),
            param=valid_text(param) if isinstance(param, str) else None,
            code=valid_text(code) if isinstance(code, str) else "backend_error",
        )
        told = code if isinstance(code, int) and 400 <= code < 600 else None
        error.status = status if status >= 400 else told or cls.status
        error.kind = openai_kind(error.status)
        return error


def valid_text(text: str) -> str:
    """A text whose halves of surrogate pairs became replacement characters, as no UTF-8 can hold them."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def valid_json(value: Any) -> Any:
    """A JSON value whose texts are valid Unicode."""
    text = json.dumps(value, ensure_ascii=False)
    valid = valid_text(text)
    return value if valid == text else json.loads(valid)


def is_error(body: dict[str, Any]) -> bool:
    """Whether a body or a chunk of a backend describes an error."""
    return bool(body.get("error")) or body.get("object") == "error"


def openai_kind(status: int) -> str:
    """The type of an error in OpenAI's terms."""
    return OPENAI_KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")


def anthropic_kind(status: int) -> str:
    """The type of an error in Anthropic's terms."""
    return ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")


def error_fields(api: str, error: FoveaError) -> dict[str, Any]:
    """The fields type, message, param and code of an error, with the types of an API.

    Messages of backends are passed on, because the backend has decided what its clients may read.
    """
    fields: dict[str, Any] = error_body(error)["error"]
    if isinstance(error, BackendError):
        param = None if error.param is None else clip(error.param, LONGEST_PARAM)
        fields |= {"message": clip(error.message, LONGEST_MESSAGE), "param": param}
    if api == "messages":
        fields["type"] = anthropic_kind(error.status)
    return fields


def refusal(api: str, error: FoveaError) -> dict[str, Any]:
    """The body of the answer to a request that was refused, in the form of an API."""
    kind = {"type": "error"} if api == "messages" else {}
    return {**kind, "error": error_fields(api, error)}


def count_tokens_refusal() -> NotFound:
    """The error for /v1/messages/count_tokens."""
    return NotFound(
        "/v1/messages/count_tokens is not offered by this gateway; accepted: /v1/messages",
        code="count_tokens_unsupported",
    )
