"""A stream of server-sent events on its way to the client, seen a piece at a time.

Pieces are passed on as they are, cut only between two events, so that an error of the gateway can follow at
any time. No event is parsed while the stream runs; a few substrings tell where usage and end are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

LONGEST_EVENT = 1024 * 1024
"""Bytes without the end of an event after which a piece is passed on all the same."""
_ENDS = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete", b"response.failed")
_USAGE = (b'"usage":{', b'"usage": {')
_NO_CHOICES = (b'"choices":[]', b'"choices": []')


class EventStream:
    """One stream.

    complete: whether its last event has been seen.
    failed: whether it held an event that reports an error.
    count: events so far.
    """

    __slots__ = ("_rest", "_strip", "_usage", "complete", "count", "failed")

    def __init__(self, *, strip_usage: bool = False) -> None:
        """strip_usage: leave out the event of usage, for which the gateway has asked and not the client."""
        self.complete = False
        self.failed = False
        self.count = 0
        self._rest = b""
        self._strip = strip_usage
        self._usage = b""

    def feed(self, data: bytes) -> bytes:
        """Take a piece of the stream and return what is passed on now: whole events."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if not data.endswith((b"\n\n", b"\r\n\r\n")):
            end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
            if end < 4 and len(data) < LONGEST_EVENT:
                self._rest = data
                return b""
            if end >= 4:
                data, self._rest = data[:end], data[end:]
        self._look(data)
        if self._strip and any(mark in data for mark in _NO_CHOICES):
            return _without_usage(data)
        return data

    def finish(self) -> bytes:
        """Return what is left at the end of the stream. An event that was cut off is left out."""
        rest, self._rest = self._rest, b""
        if not rest.strip() or not (rest.startswith(b"data:") and b"[DONE]" in rest):
            return b""
        self._look(rest)
        return rest

    def usage(self) -> dict[str, Any] | None:
        """The last usage that the stream has told; None: none. To be called at its end."""
        found = None
        for value in _values(self._usage):
            held = value.get("usage") or value.get("response", {}).get("usage")
            if isinstance(held, dict):
                found = held
        return found

    def _look(self, data: bytes) -> None:
        self.count += data.count(b"data:")
        if _USAGE[0] in data or _USAGE[1] in data:
            self._usage = data
        if not self.complete:
            self.complete = any(mark in data for mark in _ENDS)
        if b'"error"' in data and any(
            isinstance(value.get("error"), dict) or value.get("type") == "error" for value in _values(data)
        ):
            self.failed = True


def _values(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the objects of the events of a piece. Events that are no JSON objects are skipped."""
    for line in data.splitlines():
        if line.startswith(b"data:"):
            try:
                value = json.loads(line[5:])
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def _without_usage(data: bytes) -> bytes:
    """Leave out events that have usage and no choices."""
    kept = []
    for event in data.replace(b"\r\n", b"\n").split(b"\n\n"):
        value = next(_values(event), {})
        if not (value.get("choices") == [] and isinstance(value.get("usage"), dict)):
            kept.append(event)
    return b"\n\n".join(kept)


def error_event(api: str, body: dict[str, Any]) -> bytes:
    """Return the event that tells a client of an API that its stream has failed.

    api: "chat", "completions", "messages" or "responses".
    body: the body of the error, in OpenAI's form.
    """
    if api == "messages":
        return b"event: error\ndata: " + json.dumps({"type": "error", **body}).encode() + b"\n\n"
    if api == "responses":
        error = {"type": "error", **body["error"], "sequence_number": 0}
        return b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"
    return b"data: " + json.dumps(body).encode() + b"\n\n"
