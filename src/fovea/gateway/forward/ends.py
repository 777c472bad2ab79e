"""The table of ends: how an attempt or an answer can end, and what follows for breakers and bills.

One row for each way in which a backend's work can end. Breakers, retries, pauses and bills all read it, so a
client's own deadline, for example, can neither open a breaker nor be free. docs/gateway.md shows the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

GOOD, NEUTRAL, FAULT, UNREACHABLE = "good", "neutral", "fault", "unreachable"
NOTHING, USED, MOST = "nothing", "used", "most"


class End(NamedTuple):
    """The meaning of one end.

    verdict: for the backend's breakers. good: the request's stage works; fault: it failed; unreachable: the
        connection failed; neutral: the end says nothing about the backend.
    retried: whether another backend is asked. Only ends before the first byte can be retried.
    pauses: whether the backend gets no requests for the time that it has named.
    billed: what the tenant pays. used: the prompt, and what was generated; most: the prompt, and as much as
        the answer may have, because nobody knows what was generated.
    """

    verdict: str = NEUTRAL
    retried: bool = False
    pauses: bool = False
    billed: str = NOTHING


ENDS: Mapping[str, End] = {
    # before the first byte
    "unreachable": End(UNREACHABLE, retried=True),
    "broken": End(FAULT, retried=True),
    "server error": End(FAULT, retried=True),
    "link error": End(NEUTRAL, retried=True),
    "key refused": End(FAULT, retried=True),
    "engine busy": End(NEUTRAL, retried=True, pauses=True),
    "no room": End(NEUTRAL, retried=True),
    "late": End(FAULT, retried=True, billed=MOST),
    "long request": End(NEUTRAL, retried=True, billed=MOST),
    "deadline": End(NEUTRAL, billed=MOST),
    "refused": End(NEUTRAL),
    # answers that have begun
    "answered": End(GOOD, billed=USED),
    "unreadable": End(FAULT),
    "cut": End(FAULT, billed=USED),
    "silent": End(FAULT, billed=USED),
    "unfinished": End(FAULT, billed=USED),
    "error event": End(FAULT, billed=USED),
    "own error": End(NEUTRAL, billed=USED),
    "total time": End(NEUTRAL, billed=USED),
    "left stream": End(NEUTRAL, billed=USED),
    "left": End(NEUTRAL, billed=MOST),
}
"""The ends by their names, which docs/gateway.md explains."""

_OF_STATUS = {
    401: "key refused", 407: "key refused", 408: "deadline", 429: "engine busy", 501: "refused",
    503: "engine busy", 505: "refused", 529: "engine busy",
}  # fmt: skip
"""Statuses that do not mean what their hundred means. 401 and 407 are about the gateway's own key. 501 and
505 are about the request, so all backends would repeat them."""
_OWN_KINDS = frozenset(
    ("invalid_request_error", "not_found_error", "permission_error", "rate_limit_error", "request_too_large")
)
"""Types of errors that say nothing about the engine."""
_OWN_CODES = frozenset(("deadline_exceeded",))


def end_of_status(status: int, *, scope: str = "", links: bool = False) -> str:
    """Return the name of the end that an HTTP status means.

    scope: value of the header x-fovea-scope. links: whether the backend had to download images of the
        request. vLLM and llama.cpp answer 500 if they cannot: a client could close all backends to the images
        of others by a link that leads nowhere.
    """
    if status < 400:
        return "answered"
    name = _OF_STATUS.get(status, "refused" if status < 500 else "server error")
    if name == "engine busy" and scope == "request":
        return "no room"
    return "link error" if links and ENDS[name].verdict == FAULT else name


def is_own_error(error: object) -> bool:
    """Whether an error event of a stream is about its request: the client's deadline, or a status of 4xx.

    error: the object of the error in OpenAI's or Anthropic's form, or any other value.
    """
    if not isinstance(error, dict):
        return False
    code = error.get("code")
    if isinstance(code, int):
        return 400 <= code < 500 and ENDS[end_of_status(code)].verdict == NEUTRAL
    return code in _OWN_CODES or error.get("type") in _OWN_KINDS
