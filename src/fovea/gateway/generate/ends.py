"""How an attempt or an answer can end, what follows for breakers and costs, and how a stream tells its end.

The table has one row for each way in which a backend's work can end. Breakers, retries, pauses and charges
all read it, so a client's own deadline, for example, can neither open a breaker nor be free. docs/gateway.md
shows the table.

A stream of events is seen a piece at a time on its way to the client. Pieces are passed on as they are, cut
only between two events, so that an error of the gateway can follow at any time. No event is parsed while the
stream runs; a few substrings tell where usage and end are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

GOOD, NEUTRAL, FAULT, UNREACHABLE = "good", "neutral", "fault", "unreachable"
NOTHING, USED, MOST = "nothing", "used", "most"
_OF_STATUS = {
    401: "key refused", 407: "key refused", 408: "deadline", 429: "engine busy", 501: "refused",
    503: "engine busy", 505: "refused", 529: "engine busy",
}  # fmt: skip
"""Statuses that do not mean what their hundred means. 401 and 407 are about the gateway's own key. 501 and
505 are about the request, so all backends would repeat them."""
_OWN_KINDS = frozenset(
    ("invalid_request_error", "not_found_error", "permission_error", "rate_limit_error", "request_too_large")
)
"""Types of errors that say nothing about the engine."""
_OWN_CODES = frozenset(("deadline_exceeded",))
LONGEST_EVENT = 1024 * 1024
"""Bytes without the end of an event after which a piece is passed on all the same."""
_ENDS = {
    "messages": (b"message_stop",),
    "responses": (b"response.completed", b"response.incomplete", b"response.failed"),
}
_DONE = (b"[DONE]",)
DONE = b"data: [DONE]\n\n"
_REASONS = {"messages": (b'"stop_reason":"', b'"stop_reason": "'), "responses": ()}
_REASON = (b'"finish_reason":"', b'"finish_reason": "')
"""Only a field looks like this: within the text of an answer, quotes are escaped."""
_USAGE = (b'"usage":{', b'"usage": {')
_BETWEEN = re.compile(rb"(\r?\n\r?\n)")
_NO_CHOICES = (b'"choices":[]', b'"choices": []')


class End(NamedTuple):
    """The meaning of one end.

    verdict: for the backend's breakers. good: the request's stage works; fault: it failed; unreachable: the
        connection failed; neutral: the end says nothing about the backend.
    retried: whether another backend is asked. Only ends before the first byte can be retried.
    pauses: whether the backend gets no requests for the time that it has named.
    charged: what the tenant pays. used: the prompt, and what was generated; most: the prompt, and as much as
        the answer may have, because nobody knows what was generated.
    """

    verdict: str = NEUTRAL
    retried: bool = False
    pauses: bool = False
    charged: str = NOTHING


ENDS: Mapping[str, End] = {
    # before the first byte
    "unreachable": End(UNREACHABLE, retried=True),
    "broken": End(FAULT, retried=True),
    "server error": End(FAULT, retried=True),
    "link error": End(NEUTRAL, retried=True),
    "key refused": End(FAULT, retried=True),
    "engine busy": End(NEUTRAL, retried=True, pauses=True),
    "no room": End(NEUTRAL, retried=True),
    "late": End(FAULT, retried=True, charged=MOST),
    "long request": End(NEUTRAL, retried=True, charged=MOST),
    "deadline": End(NEUTRAL, charged=MOST),
    "refused": End(NEUTRAL),
    # answers that have begun
    "answered": End(GOOD, charged=USED),
    "unreadable": End(FAULT),
    "cut": End(FAULT, charged=USED),
    "silent": End(FAULT, charged=USED),
    "unfinished": End(FAULT, charged=USED),
    "error event": End(FAULT, charged=USED),
    "own error": End(NEUTRAL, charged=USED),
    "total time": End(NEUTRAL, charged=USED),
    "left stream": End(NEUTRAL, charged=USED),
    "left": End(NEUTRAL, charged=MOST),
}
"""The ends by their names, which docs/gateway.md explains."""


def end_of_status(status: int, *, scope: str = "", links: bool = False) -> str:
    """Return the name of the end that an HTTP status means.

    scope: value of the header x-fovea-scope. links: whether the backend had to download images of the
        request. vLLM and llama.cpp answer 500 if they cannot: a client could close all backends to the images
        of others by a link that leads nowhere.
    """
    if status < 400:
        return "answered"
    name = _OF_STATUS.get(status, "refused" if status < 500 else "server error")
    if name == "engine busy" and scope == "request":
        return "no room"
    return "link error" if links and ENDS[name].verdict == FAULT else name


def is_own_error(error: object) -> bool:
    """Whether an error event of a stream is about its request: the client's deadline, or a status of 4xx.

    error: the object of the error in OpenAI's or Anthropic's form, or any other value.
    """
    if not isinstance(error, dict):
        return False
    code = error.get("code")
    if isinstance(code, int):
        return 400 <= code < 500 and ENDS[end_of_status(code)].verdict == NEUTRAL
    return code in _OWN_CODES or error.get("type") in _OWN_KINDS


class EventStream:
    """One stream.

    complete: whether its last event has been seen.
    reasoned: whether it has told why the answer ends. Some engines send no last event after that.
    failed: whether it held an event that reports an error.
    own: whether that error is about the request, and no failure of the backend.
    count: events so far.
    """

    def __init__(self, api: str = "chat", *, strip_usage: bool = False) -> None:
        """api: of the backend's events.

        strip_usage: leave out the event of usage, for which the gateway has asked and not the client.
        """
        self._ends = _ENDS.get(api, _DONE)
        self._reasons = _REASONS.get(api, _REASON)
        self.complete = self.reasoned = False
        self.failed = self.own = False
        self.count = 0
        self._rest = b""
        self._strip = strip_usage
        self._first_usage = self._usage = b""

    def feed(self, data: bytes) -> bytes:
        """Take a piece of the stream and return what is passed on now: whole events."""
        if self._rest or data[-2:] != b"\n\n":
            data = self._whole(data)
            if not data:
                return b""
        self.count += data.count(b"\ndata:") + data.startswith(b"data:")
        if _USAGE[0] in data or _USAGE[1] in data:
            self._first_usage = self._first_usage or data
            self._usage = data
        for mark in self._ends:
            if mark in data and _has_end(data, mark):
                self.complete = True
        for mark in self._reasons:
            if mark in data:
                self.reasoned = True
        if b'"error"' in data:
            self._look_for_error(data)
        if self._strip and (_NO_CHOICES[0] in data or _NO_CHOICES[1] in data):
            return _without_usage(data)
        return data

    def _whole(self, data: bytes) -> bytes:
        """Return the whole events of a piece and of what was left before it, and keep the rest."""
        data = self._rest + data
        plain, carriage = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
        end = max(plain + 2 if plain >= 0 else 0, carriage + 4 if carriage >= 0 else 0)
        if not end and len(data) >= LONGEST_EVENT:
            end = len(data)
        self._rest = data[end:]
        return data[:end]

    def finish(self) -> bytes:
        """Return what is left at the end of the stream. An event that was cut off is left out."""
        rest, self._rest = self._rest, b""
        if rest.startswith(b"data:") and rest[5:].strip() in _DONE:
            self.complete = True
            return rest
        # Some engines leave out the empty line after the last event.
        return self.feed(rest.rstrip() + b"\n\n") if next(_values(rest), None) is not None else b""

    def usage(self) -> dict[str, Any] | None:
        """The usage that the stream has told; None: none. To be called at its end.

        Anthropic's API tells the tokens of the prompt at the beginning and those of the answer at the end, so
        fields of the first usage stay unless the last one has them, too.
        """
        found: dict[str, Any] = {}
        for piece in dict.fromkeys((self._first_usage, self._usage)):
            for value in _values(piece, *_USAGE):
                for holder in (value, value.get("message"), value.get("response")):
                    held = holder.get("usage") if isinstance(holder, dict) else None
                    if isinstance(held, dict):
                        found |= held
        return found or None

    def _look_for_error(self, data: bytes) -> None:
        for value in _values(data, b'"error"'):
            error = value.get("error")
            if value.get("type") == "error" or (isinstance(error, dict | str) and error):
                self.failed = True
                self.own = is_own_error(error if isinstance(error, dict) else value)


def _has_end(data: bytes, mark: bytes) -> bool:
    """Whether a piece really holds a last event. A mark within the text of an answer is none."""
    for line in data.splitlines():
        if mark in line:
            name, _, text = line.partition(b":")
            if name in (b"data", b"event") and text.strip() == mark:
                return True
            if any(value.get("type") == mark.decode() for value in _values(line)):
                return True
    return False


def _values(data: bytes, *marks: bytes) -> Iterator[dict[str, Any]]:
    """Yield the objects of the events of a piece that hold one of the marks; without marks, of all events.

    Only these are parsed, because a piece may have a hundred events. Events that are not objects are skipped.
    """
    for line in data.splitlines():
        if line.startswith(b"data:") and (not marks or any(mark in line for mark in marks)):
            try:
                value = json.loads(line[5:])
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value


def _without_usage(data: bytes) -> bytes:
    """Leave out events that have usage and no choices."""
    kept = []
    parts = _BETWEEN.split(data)  # an event, its end, an event, ..., and what follows the last end
    for event, end in zip(parts[::2], [*parts[1::2], b""], strict=True):
        value = next(_values(event, *_NO_CHOICES), {})
        if not (value.get("choices") == [] and isinstance(value.get("usage"), dict)):
            kept.append(event + end)
    return b"".join(kept)


def error_event(api: str, body: dict[str, Any]) -> bytes:
    """Return the event that tells a client of an API that its stream has failed.

    api: "chat", "completions", "messages" or "responses".
    body: the body of the error, in OpenAI's form.
    """
    if api == "messages":
        return b"event: error\ndata: " + json.dumps({"type": "error", **body}).encode() + b"\n\n"
    if api == "responses":
        error = {**body["error"], "type": "error", "sequence_number": 0}
        return b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"
    return b"data: " + json.dumps(body).encode() + b"\n\n"
