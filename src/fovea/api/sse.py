"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"
MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(payload: Any) -> bytes:
    """One `data:` event. JSON never holds a raw newline, so one line is always enough."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Decoder:
    """Bytes as they arrive to the payloads of whole `data:` events; half an event waits for its rest."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[str]:
        """Comments and fields other than `data` are skipped; bytes that are no UTF-8 become replacement characters."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data).decode(errors="replace"))
                self._data = []
        return found
