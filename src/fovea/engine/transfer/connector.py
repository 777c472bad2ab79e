"""The interface of a connector, and the offers that travel between the processes.

A producer calls `offer`, which copies a value to where others can read it, and sends the `Offer` as JSON over
an authenticated connection. The consumer calls `fetch`, then `release`. An offer ends by its release or, if
the consumer never comes, by time. The offer's checksum travels over the authenticated connection and is
compared with the bytes that were copied. So a consumer that comes too late, or reads memory that was
overwritten meanwhile, gets an error and never other bytes.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Protocol, TypeAlias

import xxhash

Buffer: TypeAlias = bytes | bytearray | memoryview
MOST = (1 << 53) - 1
"""Largest number in an offer: larger integers are not exact in every JSON parser."""
CHUNK = 1 << 20
"""Bytes that are copied at a time. Other threads of the interpreter can run between two chunks."""
_PLACE_LENGTH = 1024
_CONNECTOR = re.compile(r"[a-z][a-z0-9_]{0,31}")
_NAME = re.compile(r"[0-9a-f]{1,128}")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")


class TransferFailed(Exception):
    """A value cannot be fetched: it is lost, late or damaged, or the offer is wrong. The message says why."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A value that a process offers to another. Raises TransferFailed, naming the field, if one is wrong.

    connector: kind of the connector: "shm", "mooncake" or "folder".
    place: path of the producer's socket (shm), "host:port" of its engine (mooncake), or the folder.
    name: name of the value in hex, the hash of what it was computed from.
    size: bytes.
    checksum: xxh3_128 of the bytes, in hex.
    start: offset in the producer's slab (shm), or address (mooncake).
    lease: number of the producer's lease.
    """

    connector: str
    place: str
    name: str
    size: int
    checksum: str
    start: int = 0
    lease: int = 0

    def __post_init__(self) -> None:
        _check_text("connector", self.connector, _CONNECTOR)
        _check_text("name", self.name, _NAME)
        _check_text("checksum", self.checksum, _CHECKSUM)
        if not isinstance(self.place, str) or not 0 < len(self.place) <= _PLACE_LENGTH:
            raise TransferFailed(f"offer: place has no text of 1 to {_PLACE_LENGTH} characters")
        if not self.place.isprintable():
            raise TransferFailed("offer: place has characters that cannot be printed")
        for field in ("size", "start", "lease"):
            value = getattr(self, field)
            if type(value) is not int or not 0 <= value <= MOST:
                raise TransferFailed(f"offer: {field} is not an integer from 0 to {MOST}")

    def to_json(self) -> dict[str, str | int]:
        """Return the offer as an object of JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Offer:
        """Return the offer of a parsed JSON object. Raises TransferFailed, naming the field."""
        if not isinstance(value, dict):
            raise TransferFailed(f"offer: it is {type(value).__name__}, not an object")
        known = {field.name: field.default is MISSING for field in fields(cls)}
        for field in value:
            if field not in known:
                raise TransferFailed(f"offer: unknown field {str(field)[:40]!r}")
        for field, is_required in known.items():
            if is_required and field not in value:
                raise TransferFailed(f"offer: {field} is missing")
        return cls(**value)


class Connector(Protocol):
    """Moves values from one process to another. Producer and consumer at once; thread-safe."""

    @property
    def kind(self) -> str:
        """The kind of its offers."""

    def has(self, name: str) -> bool:
        """Tell whether the value is offered here now."""

    def offer(self, name: str, pieces: Sequence[Buffer]) -> Offer | None:
        """Copy a value, given in contiguous pieces, and offer it. None, and counted, if there is no room."""

    def fetch(self, offer: Offer, timeout_s: float) -> bytearray:
        """Return the bytes of an offer. Raises TransferFailed with the reason."""

    def release(self, offer: Offer) -> None:
        """End an offer, when the consumer has fetched it or gave up. A second call does nothing."""

    def close(self) -> None:
        """End all offers. Later calls of `offer` return None, those of `fetch` raise TransferFailed."""

    def stats(self) -> dict[str, float]:
        """Return counters since the start, and the present use of memory."""


class Counts:
    """Counters by name. Thread-safe."""

    def __init__(self, *names: str) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter(dict.fromkeys(names, 0))

    def add(self, **amounts: int) -> None:
        with self._lock:
            self._values.update(amounts)

    def count_fetch(self, read: Callable[[], bytearray]) -> bytearray:
        """Return the bytes that `read` returns, and count them, or its TransferFailed."""
        try:
            copy = read()
        except TransferFailed:
            self.add(failures=1)
            raise
        self.add(fetches=1, fetched_bytes=len(copy))
        return copy

    def values(self) -> dict[str, float]:
        with self._lock:
            return {name: float(value) for name, value in self._values.items()}


def transfer_counts() -> Counts:
    """Return the counters that every connector has."""
    return Counts("offers", "offered_bytes", "refusals", "fetches", "fetched_bytes", "failures", "releases")


def flat_views(pieces: Iterable[Buffer]) -> list[memoryview]:
    """Return the pieces as views of bytes, without empty ones. Raises TypeError if one is not contiguous."""
    views = [memoryview(piece) for piece in pieces]
    return [view.cast("B") for view in views if view.nbytes]


def copy_pieces(pieces: Iterable[memoryview], target: memoryview) -> str:
    """Copy flat views one after the other to `target`, and return the checksum of their bytes."""
    digest, end = xxhash.xxh3_128(), 0
    for piece in pieces:
        for start in range(0, len(piece), CHUNK):
            chunk = piece[start : start + CHUNK]
            target[end : end + len(chunk)] = chunk
            digest.update(chunk)
            end += len(chunk)
    return digest.hexdigest()


def copy_checked(source: memoryview, checksum: str) -> bytearray:
    """Return a copy of the bytes. Raises TransferFailed if the copy has another checksum.

    The checksum is taken over the copy: memory that changes after this call, or during it, does no harm.
    """
    copy, digest = bytearray(), xxhash.xxh3_128()
    for start in range(0, len(source), CHUNK):
        copy += source[start : start + CHUNK]
        with memoryview(copy) as view:
            digest.update(view[start:])
    if digest.hexdigest() != checksum:
        raise TransferFailed(
            "the checksum differs: the bytes were damaged, or replaced after the lease ended"
        )
    return copy


def _check_text(field: str, value: object, pattern: re.Pattern[str]) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise TransferFailed(f"offer: {field} is not text of the form {pattern.pattern}")
