"""Server-sent events: writing them for OpenAI's clients, and reading them from a stream of bytes."""

from __future__ import annotations

import json
from typing import Any

from fovea.core.json_text import one_line

DONE = b"data: [DONE]\n\n"
COMMENT = b": the answer is not ready yet\n\n"
"""Keeps a connection open. Readers of events skip it."""
MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(payload: Any) -> bytes:
    """Write one `data:` event. Its JSON is one line."""
    return b"data: " + one_line(_encode(payload)).encode() + b"\n\n"


def named_event(payload: dict[str, Any]) -> bytes:
    """Write one event whose name is the payload's `type`."""
    return b"event: " + str(payload["type"]).encode() + b"\n" + event(payload)


class Decoder:
    """A parser of a stream of events. Half an event is kept until the rest of it arrives."""

    def __init__(self, *, comments: bool = False) -> None:
        """comments: whether every comment counts as an event with an empty payload."""
        self._comments = comments
        self._rest = bytearray()
        self._data: list[bytes] = []

    @property
    def held(self) -> int:
        """Bytes that are kept, because their event is not complete."""
        return len(self._rest) + sum(map(len, self._data))

    def feed(self, data: bytes) -> list[str]:
        """Add bytes from the stream and return the payloads of all `data:` events that are now complete.

        Comments and fields other than `data` are skipped. Bytes that are not UTF-8 become replacement
        characters.
        """
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        payloads = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                payloads.append(b"\n".join(self._data).decode(errors="replace"))
                self._data = []
            elif self._comments and line.startswith(b":"):
                payloads.append("")
        return payloads
