"""Bodies of requests: the memory that all may take together, and how a JSON body is received.

Bytes are counted as they arrive, because a client can announce a large body at no cost. A body that arrived
is counted until its images and videos were read. If there is no room for new bytes, the largest body that is
still arriving is refused. If one client holds more than half of all bytes, it is the largest of that client.
So a client with many slow uploads does not keep the others out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from email.message import Message as MediaType
from typing import Any

from fovea.api.cutter import Cutter
from fovea.core.errors import InvalidRequest, Overloaded, PayloadTooLarge

FREE = 64 * 1024
"""Bytes of every body that are not counted, so that small bodies always pass. Connections are limited."""
RETRY_S = 2.0


class BodyBudget:
    """Counts the bytes of all bodies. Not thread-safe: for the event loop's thread.

    capacity: most bytes of all bodies together.
    largest: most bytes of one body.
    held: bytes that are counted now.
    refused: number of bodies that had to give way so far.
    """

    def __init__(self, capacity: int, largest: int) -> None:
        self.capacity = capacity
        self.largest = largest
        self.held = 0
        self.refused = 0
        self._bodies: dict[BodyMemory, None] = {}

    def begin(self, owner: str, refuse: Callable[[], None]) -> BodyMemory:
        """Count one body until `BodyMemory.end`.

        owner: the client. refuse: called if the body has to give way, while it is arriving.
        """
        memory = BodyMemory(self, owner, refuse)
        self._bodies[memory] = None
        return memory

    def overloaded(self) -> Overloaded:
        """The error for a body that had to give way."""
        return Overloaded(
            f"the bodies of requests fill the {self.capacity >> 20} MiB that they may take (max_bodies_mib); "
            "try again later",
            retry_after=RETRY_S,
            code="bodies_full",
            scope="request",
        )

    def stats(self) -> dict[str, float]:
        """Return numbers by their names in `observe.table`."""
        return {
            "body_bytes": self.held,
            "body_capacity_bytes": self.capacity,
            "bodies_refused": self.refused,
        }

    def end(self, memory: BodyMemory) -> None:
        """Count a body no longer."""
        self._bodies.pop(memory, None)

    def make_room(self) -> None:
        """Refuse arriving bodies until the others fit."""
        while self.held > self.capacity and (victim := self._victim()) is not None:
            self.refused += 1
            victim.give_way()

    def _victim(self) -> BodyMemory | None:
        arriving = [memory for memory in self._bodies if memory.arriving and memory.size]
        owners: dict[str, int] = {}
        for memory in self._bodies:
            owners[memory.owner] = owners.get(memory.owner, 0) + memory.size
        heavy = [memory for memory in arriving if 2 * owners[memory.owner] > self.held]
        return max(heavy or arriving, key=lambda memory: memory.size, default=None)


class BodyMemory:
    """The bytes of one body.

    owner: the client that sends it.
    size: bytes that are counted now.
    arriving: whether it is not complete yet, so that it can be refused.
    refused: whether it had to give way.
    """

    def __init__(self, budget: BodyBudget, owner: str, refuse: Callable[[], None]) -> None:
        self.owner = owner
        self.size = 0
        self.arriving = True
        self.refused = False
        self._received = 0
        self._budget = budget
        self._refuse = refuse

    def add(self, count: int) -> None:
        """Count bytes that arrived. Raises Overloaded if this body has to give way."""
        before = max(0, self._received - FREE)
        self._received += count
        self._grow(max(0, self._received - FREE) - before)
        self._budget.make_room()
        if self.refused:
            raise self._budget.overloaded()

    def arrived(self) -> None:
        """Note that the body is complete: it is not refused any more."""
        self.arriving = False

    def shrink(self, count: int) -> None:
        """Give back bytes that are not in memory any more."""
        self._grow(-min(count, self.size))

    def release(self) -> None:
        """Give everything back."""
        self.arriving = False
        self._grow(-self.size)

    def end(self) -> None:
        """Give everything back, because the request has ended."""
        self.release()
        self._budget.end(self)

    def give_way(self) -> None:
        """Give everything back and stop the request."""
        self.refused = True
        self.release()
        self._refuse()

    def _grow(self, count: int) -> None:
        self.size += count
        self._budget.held += count


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
"""Returns the next message of a request, as ASGI's `receive`."""
Send = Callable[[Message], Awaitable[None]]
"""Sends a part of the answer, as ASGI's `send`."""
MIB = 1024 * 1024
SLICE = 64 * 1024
"""Bytes that are cut between two passes of the event loop, a millisecond or two at most."""


class UnsupportedEncoding(InvalidRequest):
    """The body is compressed."""

    status = 415
    default_code = "unsupported_encoding"


def check_body_headers(encoding: str, content_type: str, length: str, largest: int) -> None:
    """Check the headers of a request whose body has to be JSON.

    encoding, content_type, length: values of Content-Encoding, Content-Type and Content-Length; "": the
        request has no such header.
    largest: most bytes of the body.
    Raises UnsupportedEncoding, InvalidRequest and PayloadTooLarge.
    """
    encoding = encoding.strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedEncoding(
            f"the body has the Content-Encoding {encoding[:40]!r}; accepted: bodies that are not compressed"
        )
    if content_type != "application/json" and not _is_json(content_type):
        raise InvalidRequest(
            "the body must be JSON, sent as Content-Type: application/json", code="invalid_json"
        )
    if length.isdecimal() and int(length) > largest:
        raise PayloadTooLarge(
            f"the body has {int(length)} bytes; accepted: at most {largest} bytes ({largest // MIB} MiB)"
        )


async def receive_body(receive: Receive, memory: BodyMemory, budget: BodyBudget) -> Cutter:
    """Cut a body while it arrives.

    receive: `Exchange.receive`. memory: counts its bytes.
    Raises PayloadTooLarge, InvalidRequest, Overloaded, and ClientGone if the client disconnects.
    """
    cutter = Cutter()
    while True:
        message = await receive()
        data = message.get("body", b"")
        if cutter.size + len(data) > budget.largest:
            raise PayloadTooLarge(
                f"the body has more than {budget.largest} bytes ({budget.largest // MIB} MiB)"
            )
        memory.add(len(data))
        for at in range(0, len(data), SLICE):
            if at:
                await asyncio.sleep(0)
            cutter.feed(data[at : at + SLICE])
        if not message.get("more_body", False):
            return cutter


def _is_json(content_type: str) -> bool:
    kind = MediaType()
    kind["content-type"] = content_type or "text/plain"
    subtype = kind.get_content_subtype()
    return kind.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
