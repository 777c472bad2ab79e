"""Reads a response: its body within the limits, and the terms on which a cache may reuse it.

A body that is too large or of a wrong type is refused early, and `Arrivals` bounds the bytes of all bodies
that are arriving. `read_terms` follows RFC 9111 as a shared cache. Where the RFC lets a cache choose, this
one is cautious: a response without an explicit lifetime is revalidated before every use, one that can
neither be reused nor revalidated is not stored, and a stale one is never used without revalidation.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, cast

from fovea.core.errors import InvalidMedia, Overloaded
from fovea.media.image.probe import describe, peek
from fovea.media.limits import IMAGE, Kind, MediaLimits
from fovea.media.video_container import container_of

if TYPE_CHECKING:
    import httpx

_FIRST_PEEK = 64
_LAST_PEEK = 256 * 1024
"""Most bytes that are examined while a download arrives, because that blocks the event loop.

An image whose size comes later in the file, after much metadata, is examined in a thread once it is complete.
"""
_STORED_HEADERS = ("cache-control", "expires", "date", "age", "etag", "last-modified", "vary")
_PER_RESPONSE = ("age", "date")
_DIRECTIVE = re.compile(r'([^\s=,;"]+)(?:\s*=\s*("[^"]*"|[^\s,;]*))?')
_MAX_LENGTH = 2048


async def receive(response: httpx.Response, kind: Kind, limits: MediaLimits, arrivals: Arrivals) -> bytes:
    """Receive the body of a response.

    Raises InvalidMedia for a status other than 200, a content encoding, a body above the kind's ceiling, a
    type that is not accepted, and for an image whose header breaks a limit. Raises Overloaded if all
    downloads together have too many bytes and this one is the largest.
    """
    most = kind.max_bytes(limits)
    _check_head(response, kind, most)
    body = io.BytesIO()  # unlike a bytearray, it gives away its bytes without a copy
    size = 0
    next_peek: int | None = _FIRST_PEEK
    async with arrivals.open() as arrival:
        async for chunk in cast("AsyncIterator[bytes]", response.stream):
            size += len(chunk)
            if size > most:
                raise _too_large(kind, "more", most)
            arrival.add(len(chunk))
            body.write(chunk)
            if next_peek is not None and size >= next_peek:
                # Refuses a web page or a decompression bomb before it is downloaded completely. Doubling the
                # distance between the checks keeps them cheap.
                with body.getbuffer() as view:
                    start = bytes(view[:_LAST_PEEK])
                done = _check_start(start, kind, limits) or size >= _LAST_PEEK
                next_peek = None if done else 2 * size
    if not size:
        raise fetch_error(kind, f"the {kind.noun}'s server answered with an empty body")
    return body.getvalue()


def fetch_error(kind: Kind, message: str) -> InvalidMedia:
    return kind.invalid(message, "{noun}_fetch_failed")


def _check_head(response: httpx.Response, kind: Kind, most: int) -> None:
    if response.status_code != 200:
        raise fetch_error(kind, f"the {kind.noun}'s server answered {response.status_code}; accepted: 200")
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise fetch_error(
            kind,
            f"the {kind.noun}'s server answered with content encoding {encoding[:40]!r}; accepted: identity",
        )
    announced = response.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > most:
        raise _too_large(kind, f"{announced[:20]} bytes", most)


def _check_start(start: bytes, kind: Kind, limits: MediaLimits) -> bool:
    """Check the first bytes. Return whether the header is complete; raise InvalidMedia as for the file."""
    if kind is IMAGE:
        return peek(start, limits) is not None
    if container_of(start) is None:
        raise kind.invalid(
            f"the data is not a video of an accepted type but {describe(start)}; accepted: MP4 and WebM",
            "unsupported_{noun}_type",
        )
    return True


def _too_large(kind: Kind, size: str, most: int) -> InvalidMedia:
    return kind.invalid(
        f"the {kind.noun}'s server sends {size}; accepted: at most {most} bytes", "{noun}_too_large"
    )


class Arrival:
    """One download that is arriving. size: its bytes so far."""

    def __init__(self, arrivals: Arrivals, stop: asyncio.Timeout) -> None:
        self.size = 0
        self.refused = False
        self._arrivals = arrivals
        self._stop = stop

    def add(self, size: int) -> None:
        """Count further bytes. Raises Overloaded if this download has to make room for others."""
        self._arrivals.count(self, size)

    def refuse(self) -> None:
        """Stop the download, wherever it waits."""
        self.refused = True
        self._stop.reschedule(asyncio.get_running_loop().time())


class Arrivals:
    """Counts the bytes of unfinished downloads. If there is no more room, the largest of them is refused.

    So many large videos at a time do not stop a small image. A download that has ended is counted no more:
    its caller counts the bytes that it keeps. Use it within one event loop.

    capacity: ceiling in bytes. held: bytes that are counted now.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self._open: set[Arrival] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Arrival]:
        """Yield a new download. Raises Overloaded from within the block if the download is refused."""
        try:
            async with asyncio.timeout(None) as stop:
                arrival = Arrival(self, stop)
                self._open.add(arrival)
                try:
                    yield arrival
                finally:
                    self._close(arrival)
        except TimeoutError:
            if not arrival.refused:
                raise
            raise self._error(arrival) from None

    def count(self, arrival: Arrival, size: int) -> None:
        """Count `size` further bytes of a download. Raises Overloaded if it is the one that is refused."""
        if not arrival.refused:
            arrival.size += size
            self.held += size
        while self.held > self.capacity:
            largest = max(self._open, key=lambda other: other.size)
            # Its memory is free when its task runs next, which is before any further bytes are read.
            self._close(largest)
            largest.refuse()
        if arrival.refused:
            raise self._error(arrival)

    def _close(self, arrival: Arrival) -> None:
        if arrival in self._open:
            self._open.remove(arrival)
            self.held -= arrival.size

    def _error(self, arrival: Arrival) -> Overloaded:
        return Overloaded(
            f"the download was stopped after {arrival.size} bytes, as the largest one, because all downloads "
            f"together have more than {self.capacity} bytes; try again",
            retry_after=1.0,
            code="media_full",
            scope="request",
        )


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms on which a cache may reuse a response.

    url: the URL that answered, after all redirects.
    headers: the headers from which the terms were read.
    allowed: whether a cache may store the response.
    fresh_s: seconds from the response during which it is reused without revalidation.
    """

    url: str
    headers: tuple[tuple[str, str], ...]
    allowed: bool
    fresh_s: float

    @property
    def storable(self) -> bool:
        """Whether storing the response is allowed and useful."""
        return self.allowed and (self.fresh_s > 0 or bool(self.validators))

    @property
    def validators(self) -> dict[str, str]:
        """Headers of a request that revalidates the response; empty if it cannot be revalidated."""
        values = dict(self.headers)
        pairs = (
            ("If-None-Match", values.get("etag", "")),
            ("If-Modified-Since", values.get("last-modified", "")),
        )
        # Only printable ASCII can be sent back.
        return {name: value for name, value in pairs if value and value.isascii() and value.isprintable()}

    @property
    def size(self) -> int:
        """Estimated bytes of these terms in memory."""
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def limit(self, fresh_s: float) -> Terms:
        """Return these terms, fresh for at most `fresh_s` seconds: a redirect may expire earlier."""
        return replace(self, fresh_s=min(self.fresh_s, fresh_s))

    def renew(self, headers: Mapping[str, str], now: float) -> Terms:
        """Return the terms after a 304 response with these headers, which replace the old ones."""
        old = {name: value for name, value in self.headers if name not in _PER_RESPONSE}
        return read_terms(self.url, {**old, **_stored_headers(headers)}, now)


def read_terms(url: str, headers: Mapping[str, str], now: float) -> Terms:
    """Read the terms of a response from its headers.

    headers: names in lower case, or in any case if the mapping ignores case.
    now: seconds of the epoch.
    """
    directives = _directives(headers.get("cache-control", ""))
    varies = any(name.strip() == "*" for name in headers.get("vary", "").split(","))
    allowed = not (varies or "no-store" in directives or "private" in directives)
    fresh_s = max(0.0, _lifetime(directives, headers, now) - _seconds(headers.get("age"), 0.0))
    return Terms(url, tuple(_stored_headers(headers).items()), allowed, fresh_s if allowed else 0.0)


def _stored_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _STORED_HEADERS if name in headers}


def _lifetime(directives: Mapping[str, str], headers: Mapping[str, str], now: float) -> float:
    """Return the seconds from the response's creation to its expiry; 0 if they are unknown or unreadable."""
    if "no-cache" in directives:
        return 0.0
    for name in ("s-maxage", "max-age"):
        if name in directives:
            return _seconds(directives[name], 0.0)
    if "expires" not in headers:
        return 0.0
    created_at = _date(headers.get("date", ""), now)
    return _date(headers["expires"], created_at) - created_at


def _directives(text: str) -> dict[str, str]:
    """Return the values of Cache-Control directives by lower-case name.

    If a directive occurs twice, the smaller lifetime counts; an unreadable one counts as 0.
    """
    if len(text) > _MAX_LENGTH:
        return {"no-store": ""}
    values: dict[str, str] = {}
    for match in _DIRECTIVE.finditer(text):
        name, value = match.group(1).lower(), (match.group(2) or "").strip().strip('"')
        if name in values and _seconds(values[name], 0.0) <= _seconds(value, 0.0):
            continue
        values[name] = value
    return values


def _seconds(text: str | None, default: float) -> float:
    text = (text or "").strip()
    return float(min(int(text[:12]), 1 << 31)) if text.isascii() and text.isdigit() else default


def _date(text: str, default: float) -> float:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return default
