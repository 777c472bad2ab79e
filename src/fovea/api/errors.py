"""Bodies and headers of errors."""

from __future__ import annotations

import math
from typing import Any

from fovea.core.errors import EngineError, FoveaError, Overloaded, Unavailable

SCOPE = "x-fovea-scope"
LONGEST_MESSAGE = 500
LONGEST_PARAM = 200
DEFECT = "the server failed on this request; see its log"


def error_body(error: FoveaError) -> dict[str, Any]:
    """The body of an error, in OpenAI's form.

    Its length is bounded, whatever of the request it repeats. Errors that are not meant for clients, such as
    those about a checkpoint, may tell about the server's files: their message stays in the server's log.
    """
    internal = error.status == 500 and not isinstance(error, EngineError)
    message = DEFECT if internal else clip(error.message, LONGEST_MESSAGE)
    param = None if error.param is None else clip(error.param, LONGEST_PARAM)
    return {"error": {"message": message, "type": error.kind, "param": param, "code": error.code}}


def error_headers(error: FoveaError) -> dict[str, str]:
    """The headers of an answer to an error: when to try again, and how to send a key. Names in lower case.

    x-fovea-scope is the scope of a status 429 or 503, see `fovea.core.errors.Scope`.
    """
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(math.ceil(error.retry_after))
    if isinstance(error, Overloaded | Unavailable):
        headers[SCOPE] = error.scope
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 503:
        headers["retry-after"] = "5"
    return headers


def clip(text: str, longest: int) -> str:
    """Leave out the middle of a text that is longer than so many characters."""
    if len(text) <= longest:
        return text
    end = longest // 3
    return f"{text[: longest - end - 3]}...{text[-end:]}"
