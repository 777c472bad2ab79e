"""One attempt: a request is sent to one backend, up to the first byte of its answer.

All traffic to backends for requests goes through `Upstream.open`, which a test can replace.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
from aiohttp.payload import Payload

from fovea.api.errors import SCOPE
from fovea.gateway.backends.backend import Backend
from fovea.gateway.generate.ends import ENDS, EventStream, end_of_status
from fovea.gateway.settings import TimeoutSettings

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter

KEEP_ALIVE_S = 4.0
"""Seconds for which an idle connection to a backend is reused: less than the 5 s after which uvicorn closes
one, because a request that is sent into a closing connection is lost."""
LARGEST_ANSWER = 16 * 1024 * 1024
LARGEST_ERROR = 64 * 1024
SMALL = 64 * 1024
LEAST_STATUS, MOST_STATUS = 200, 599
BROKEN = (aiohttp.ClientError, OSError)
"""Errors of a stream that breaks off."""


class Outgoing(NamedTuple):
    """A request as one backend gets it.

    path: of its URL.
    pieces: of its body.
    headers: names in lower case.
    """

    path: str
    pieces: Sequence[bytes | bytearray]
    headers: Mapping[str, str]


@dataclass(slots=True)
class Answer:
    """An answer whose first byte has arrived.

    status: HTTP status.
    headers: (name, value), names in lower case.
    is_stream: whether it is a stream of events.
    first: the first bytes of a stream, or the complete body.
    read: returns the next bytes of a stream; b"" at its end. Raises one of BROKEN if it breaks off.
    close: ends the answer. A stream that is not at its end closes its connection, so the backend stops.
    """

    status: int
    headers: Sequence[tuple[str, str]]
    is_stream: bool
    first: bytes
    read: Callable[[], Awaitable[bytes]]
    close: Callable[[], None]


class Upstream:
    """The connections of one worker to all backends. Use it within one event loop, and `aclose` it."""

    def __init__(self, timeouts: TimeoutSettings) -> None:
        self._timeouts = timeouts
        self._session: aiohttp.ClientSession | None = None

    async def open(self, backend: Backend, outgoing: Outgoing, *, stream: bool, deadline: float) -> Answer:
        """Send a request and return its answer, at the first byte of a stream or at the end of another one.

        deadline: time of the event loop's clock at which the request ends.
        Raises AttemptFailed. A status that another backend would repeat (such as 400) is an answer.
        """
        loop = asyncio.get_running_loop()
        until = min(deadline, loop.time() + self._timeouts.first_byte_s) if stream else deadline
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout_at(until):
                response = await self._http().post(
                    backend.config.url + outgoing.path,
                    data=_payload(outgoing.pieces),
                    headers=_with_key(outgoing.headers, backend.key),
                    allow_redirects=False,
                )
                answer = await self._begin(response, stream=stream)
                response = None
                return answer
        except AttemptFailed as failure:
            failure.message = f"{backend.name}: {failure.message}"
            raise
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise AttemptFailed(
                f"{backend.name} cannot be connected to: {reason_of(error)}", "connect", connected=False
            ) from error
        except TimeoutError:
            part, limit = (
                "first byte" if stream else "answer",
                "first_byte_s" if until < deadline else "total_s",
            )
            raise AttemptFailed(f"{backend.name} gave no {part} in time ({limit})", "timeout") from None
        except (aiohttp.ClientError, OSError) as error:
            raise AttemptFailed(f"{backend.name} broke off: {reason_of(error)}", "broken") from error
        finally:
            if response is not None:
                response.close()

    async def _begin(self, response: aiohttp.ClientResponse, *, stream: bool) -> Answer:
        """Read an answer up to the point at which it is passed on. Raises AttemptFailed."""
        encoding = response.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            response.close()
            raise AttemptFailed("the backend's answer is compressed, for which it was not asked", "broken")
        kind = response.headers.get("content-type", "")
        is_stream = stream and response.status == 200 and kind.startswith("text/event-stream")
        if is_stream:
            first = await response.content.readany()
            if not first:
                raise AttemptFailed("the stream ended before its first event", "broken")
            if first.lstrip().startswith((b'data: {"error"', b'data:{"error"', b"event: error")) and not (
                _is_own(first)
            ):
                raise AttemptFailed("the stream began with an error", "stream error", body=first)
            return _answer(response, first, is_stream=True)
        if not LEAST_STATUS <= response.status <= MOST_STATUS or 300 <= response.status < 400:
            response.close()
            raise AttemptFailed(
                f"the backend answered {response.status}, which is not an answer to such a request", "broken"
            )
        if ENDS[end_of_status(response.status)].retried:
            body = await _bounded(response, LARGEST_ERROR)
            raise AttemptFailed(
                f"the backend answered {response.status}", "status", status=response.status,
                retry_after=_seconds(response.headers.get("retry-after", "")),
                scope=response.headers.get(SCOPE, ""), body=body,
            )  # fmt: skip
        return _answer(response, await _bounded(response, LARGEST_ANSWER), is_stream=False)

    async def get(self, url: str, key: str, timeout_s: float) -> tuple[int, bytes]:
        """Return status and body of a GET, for health checks. Raises OSError or TimeoutError."""
        try:
            async with asyncio.timeout(timeout_s):
                async with self._http().get(
                    url, headers=_with_key({}, key), allow_redirects=False
                ) as response:
                    return response.status, await _bounded(response, 4 * 1024 * 1024)
        except (aiohttp.ClientError, AttemptFailed) as error:
            raise OSError(reason_of(error)) from error

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=10),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.connect_s),
                auto_decompress=False,
                trust_env=False,
                skip_auto_headers=("User-Agent", "Accept-Encoding", "Content-Type"),
                read_bufsize=256 * 1024,
                max_line_size=64 * 1024,
                max_field_size=64 * 1024,
            )
        return self._session


class Pieces(Payload):
    """A body for aiohttp that is written a piece at a time. It can be written several times."""

    _autoclose = True

    def __init__(self, pieces: Sequence[bytes | bytearray], size: int) -> None:
        super().__init__(pieces)
        self._size = size

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for piece in self._value:
            await writer.write(piece)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        await self.write(writer)


@dataclass(eq=False)
class AttemptFailed(Exception):
    """A backend gave no answer that can be passed on. Nothing has reached the client.

    reason: "connect", "timeout", "status", "broken" or "stream error".
    connected: whether the backend took the request.
    status: its HTTP status; 0: it sent none.
    retry_after: seconds after which it wants to be asked again.
    scope: value of the header x-fovea-scope of a 429 or 503; empty: it was missing.
    body: the body of its error; b"": none.
    """

    message: str
    reason: str
    connected: bool = True
    status: int = 0
    retry_after: float = 0.0
    scope: str = ""
    body: bytes = b""

    def __str__(self) -> str:
        return self.message

    def end(self, *, links: bool) -> str:
        """Return the name of its end in the table `ends.ENDS`. links: whether the request has links."""
        if self.reason == "status":
            return end_of_status(self.status, scope=self.scope, links=links)
        if self.reason == "stream error" and links:
            return "link error"
        return {"connect": "unreachable", "timeout": "late", "stream error": "server error"}.get(
            self.reason, "broken"
        )


def _answer(response: aiohttp.ClientResponse, first: bytes, *, is_stream: bool) -> Answer:
    headers = [(name.lower(), value) for name, value in response.headers.items()]
    # No method is around `readany`, because it is called for every event.
    return Answer(response.status, headers, is_stream, first, response.content.readany, response.close)


def _is_own(first: bytes) -> bool:
    """Whether the error with which a stream begins is about its request. Other backends would repeat it."""
    events = EventStream()
    events.feed(first)
    return events.own


def _payload(pieces: Sequence[bytes | bytearray]) -> Any:
    """Return a body for aiohttp that is written a piece at a time, so that large ones are not copied."""
    size = sum(map(len, pieces))
    if size <= SMALL:
        return b"".join(pieces)
    return Pieces(pieces, size)


def _with_key(headers: Mapping[str, str], key: str) -> Mapping[str, str]:
    return {**headers, "authorization": f"Bearer {key}"} if key else headers


async def _bounded(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Read a body. Raises AttemptFailed if it has more than `most` bytes."""
    parts, size = [], 0
    while data := await response.content.readany():
        parts.append(data)
        size += len(data)
        if size > most:
            response.close()
            raise AttemptFailed(f"the backend's answer has more than {most} bytes", "broken")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        return min(60.0, max(0.0, float(text)))
    return 0.0


def reason_of(error: BaseException) -> str:
    """Say why a connection failed, for logs and clients: without addresses, and without bytes of the answer.

    aiohttp's own messages have both.
    """
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its host was not found"
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return "the connection was closed"
    if isinstance(error, aiohttp.ClientResponseError):
        return "the answer is not HTTP"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno) if error.errno > 0 else "its host was not found"
    return type(error).__name__
