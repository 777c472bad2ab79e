"""Errors of HTTP itself: those that a route raises, and answers that are written before any route is known.

Warnings about clients are limited to one of each kind in ten seconds: a stranger decides how often a
malformed request arrives, and without a limit the log would grow at the speed of the network.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import NamedTuple

from fovea.api.errors import SCOPE, error_body
from fovea.core.errors import EngineError, FoveaError, InvalidRequest, Overloaded, Unavailable


class ClientGone(Exception):
    """The client closed the connection, so no answer can be sent."""


class MethodNotAllowed(InvalidRequest):
    """The route exists, but not for this HTTP method.

    allow: the methods that are accepted, for the header of that name.
    """

    status = 405
    default_code = "method_not_allowed"

    def __init__(self, message: str, *, allow: Sequence[str]) -> None:
        super().__init__(message)
        self.allow = tuple(allow)


class Refusal(NamedTuple):
    """The reason why a connection ends without an answer of a route.

    status: HTTP status.
    reason: word for the metrics.
    message: text for the client.
    """

    status: int
    reason: str
    message: str

    def response(self, headers: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
        """Return the whole response, in OpenAI's form. It closes the connection."""
        body = json.dumps(error_body(self._error())).encode()
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}".encode(),
            *(name + b": " + value for name, value in headers),
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        ]
        if self.status in (429, 503):
            lines += [b"retry-after: 1", SCOPE.encode() + b": engine"]
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    def _error(self) -> FoveaError:
        if self.status == 429:
            return Overloaded(self.message, retry_after=1.0, code=self.reason)
        if self.status == 503:
            return Unavailable(self.message)
        if self.status >= 500 and self.status != 505:
            return EngineError(self.message)
        return InvalidRequest(self.message, code=self.reason)


TOO_MANY = Refusal(429, "too_many_connections", "this address has too many open connections")
HEADER_TIMEOUT = Refusal(408, "header_timeout", "the request line and the headers did not arrive in time")
BODY_TIMEOUT = Refusal(408, "body_timeout", "the body did not arrive in time")
SHUTTING_DOWN = Refusal(503, "unavailable", "the server is shutting down")
DEFECT = Refusal(500, "engine_error", "the request failed; see the server's log")


def malformed(detail: str) -> Refusal:
    """The refusal of a request that is not valid HTTP, or that can be read in two ways."""
    return Refusal(400, "malformed_http", f"this is not a valid HTTP/1.1 request: {detail}")


log = logging.getLogger("fovea.server")
PERIOD_S = 10.0


class Notices:
    """Writes warnings, and counts those that it leaves out.

    clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, kind: str, message: str) -> None:
        """Log a message, unless one of this kind was logged within the last ten seconds.

        kind: a word of the code, never of a client: every kind is remembered.
        """
        now = self._clock()
        if now < self._next.get(kind, 0.0):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._next[kind] = now + PERIOD_S
        more = self._left_out.pop(kind, 0)
        log.warning("%s%s", message, f" (and {more} more of this kind before)" if more else "")
