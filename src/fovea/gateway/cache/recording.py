"""Takes the bytes of a backend's answer while they pass, and makes a stored answer of them afterwards."""

from __future__ import annotations

import asyncio
import json

from fovea.api import sse
from fovea.core.json_text import one_line
from fovea.gateway.cache.assemble import Assembler
from fovea.gateway.cache.entry import Entry, Unstorable, check_answer

SLICE = 32
"""Events that are parsed before other tasks get a turn."""
_SURROGATES = (b"\\ud", b"\\uD")


class Room:
    """The bytes of all answers that are being recorded, under one ceiling.

    limit: ceiling in bytes.
    """

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class Recording:
    """The bytes of one answer. While it grows, it only appends; it is parsed after its end.

    reason: why the answer will not be stored, one word; empty if nothing speaks against it yet.
    """

    __slots__ = ("_limit", "_parts", "_room", "_size", "reason")

    def __init__(self, limit: int, room: Room) -> None:
        """limit: most bytes of this answer, as the backend sends it. room: shared by all recordings."""
        self.reason = ""
        self._parts: list[bytes] = []
        self._size = 0
        self._limit = limit
        self._room = room

    def feed(self, data: bytes) -> None:
        """Append bytes of the answer's body. They must not change later."""
        if self.reason:
            return
        size = len(data)
        if self._size + size > self._limit:
            self.drop("too_large")
        elif self._room.used + size > self._room.limit:
            self.drop("no_room")
        else:
            self._size += size
            self._room.used += size
            self._parts.append(data)

    def drop(self, reason: str) -> None:
        """Give the bytes back. The answer will not be stored."""
        self._room.used -= self._size
        self._size = 0
        self._parts = []
        self.reason = self.reason or reason

    async def entry(self, *, stream: bool, choices: int, stored: float, limit: int) -> Entry:
        """Return the answer. It is parsed in short slices, between which other tasks run.

        stream: whether the bytes are server-sent events, or one JSON body.
        choices: number of choices that the request asked for.
        stored: the time now, in seconds since 1970.
        limit: most bytes of the stored body.

        Raises Unstorable unless the answer is whole and successful.
        """
        if self.reason:
            raise Unstorable(self.reason)
        try:
            if stream:
                body = (await self._assemble()).body()
                check_answer(body, choices)
                data = one_line(json.dumps(body, ensure_ascii=False, separators=(",", ":"))).encode()
            else:
                data = b"".join(self._parts)
                body = json.loads(data)
                check_answer(body, choices)
                if any(escape in data for escape in _SURROGATES):
                    # Half of a surrogate pair cannot be sent as a stream.
                    json.dumps(body, ensure_ascii=False).encode()
        except (UnicodeError, json.JSONDecodeError, RecursionError):
            raise Unstorable("unreadable") from None
        if len(data) > limit:
            raise Unstorable("too_large")
        return Entry(data, stored, body.get("usage") is not None)

    async def _assemble(self) -> Assembler:
        """Read the events of the stream. Raises Unstorable unless [DONE] is the last one."""
        # The decoder would put replacement characters in place of wrong bytes.
        b"".join(self._parts).decode()
        assembler, decoder, done, number = Assembler(), sse.Decoder(), False, 0
        for part in self._parts:
            for payload in decoder.feed(part):
                if done:
                    raise Unstorable("cut")
                if payload.strip() == "[DONE]":
                    done = True
                else:
                    assembler.add(json.loads(payload))
                number += 1
                if number % SLICE == 0:
                    await asyncio.sleep(0)
        if not done:
            raise Unstorable("cut")
        return assembler
