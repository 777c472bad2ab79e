"""Receives the body of a response, and refuses it early if it is too large or of a wrong type."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, cast

from fovea.core.errors import InvalidMedia
from fovea.media.fetch.arrivals import Arrivals
from fovea.media.image.probe import peek
from fovea.media.image.sniff import describe
from fovea.media.kind import IMAGE, Kind
from fovea.media.limits import MediaLimits
from fovea.media.video.container import container_of

if TYPE_CHECKING:
    import httpx

_FIRST_PEEK = 64
_LAST_PEEK = 256 * 1024
"""Most bytes that are examined while a download arrives, because that blocks the event loop.

An image whose size comes later in the file, after much metadata, is examined in a thread once it is complete.
"""


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
            kind, f"the {kind.noun}'s server answered with content encoding {encoding[:40]!r}; accepted: none"
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
