"""Answers to requests that no route sees, written straight to the connection."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import NamedTuple

from fovea.api.bodies.errors import SCOPE, error_body
from fovea.core.errors import EngineError, FoveaError, InvalidRequest, Overloaded, Unavailable


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
    """The refusal of a request that is no valid HTTP, or that can be read in two ways."""
    return Refusal(400, "malformed_http", f"this is no valid HTTP/1.1 request: {detail}")
