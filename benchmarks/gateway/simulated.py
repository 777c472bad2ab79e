"""A simulated engine: its behaviour, its counters, and the bytes of its answers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

MODEL = "simulated"
MODES = ("answer", "stall", "kill", "refuse")
EVENTS = 16
"""Events of a stream whose request has no `max_tokens`."""
NUMBER = re.compile(rb"\s*:\s*(\d+)")
TRUE = re.compile(rb"\s*:\s*true")


@dataclass(frozen=True)
class Behaviour:
    """The way in which a backend answers chat requests.

    mode: `answer`; `stall`: stop after some events and keep the connection open; `kill`: reset the connection
        there; `refuse`: answer with an error status.
    after: events of a stream that are sent before a stall or a reset. 0: not even the head of the answer is
        sent; a complete answer always stalls or is reset without a head.
    status: status of refusals.
    gap_ms: pause between two events in milliseconds; 0: each event is written as soon as the last one was.
    first_ms: pause before an answer in milliseconds.
    """

    mode: str = "answer"
    after: int = 0
    status: int = 503
    gap_ms: float = 0.0
    first_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"the mode is {self.mode!r}; accepted are {', '.join(MODES)}")
        if not 400 <= self.status <= 599:
            raise ValueError(f"the status of refusals is {self.status}; accepted are 400 to 599")
        if min(self.after, self.gap_ms, self.first_ms) < 0:
            raise ValueError("after, gap_ms and first_ms are 0 or more")


@dataclass
class Counts:
    """Counters of one backend since its start.

    requests: chat requests that arrived completely.
    body_bytes: bytes of their bodies.
    events: events that were written to streams.
    failures: chat requests that stalled, were reset or refused on purpose.
    cut: answers whose client closed the connection before their end.
    connections: connections that were opened.
    open_connections: connections that are open now.
    """

    requests: int = 0
    body_bytes: int = 0
    events: int = 0
    failures: int = 0
    cut: int = 0
    connections: int = 0
    open_connections: int = 0


@dataclass
class Backend:
    """One simulated engine.

    name: value of the header x-fovea-backend-id of its answers.
    digest: whether answers name the SHA-256 of the request's body, in x-fovea-body-sha256.
    """

    name: str
    behaviour: Behaviour = Behaviour()
    digest: bool = False
    counts: Counts = field(default_factory=Counts)

    def head(self, status: int, content_type: str, extra: str = "") -> bytes:
        """The head of an answer, without the empty line at its end."""
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        return f"{line}content-type: {content_type}\r\nx-fovea-backend-id: {self.name}\r\n{extra}".encode()

    def complete(self, status: int, body: bytes, extra: str = "") -> bytes:
        """A whole JSON answer."""
        return b"%scontent-length: %d\r\n\r\n%s" % (
            self.head(status, "application/json", extra),
            len(body),
            body,
        )


def chunk(data: bytes) -> bytes:
    """Data in the chunked transfer coding of HTTP/1.1."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def number_of(body: bytes, name: bytes, default: int) -> int:
    """Find the number of a JSON key without parsing the body, which may hold megabytes of image."""
    at = body.find(name)
    found = NUMBER.match(body, at + len(name)) if at >= 0 else None
    return int(found[1]) if found else default


def is_true(body: bytes, name: bytes) -> bool:
    """Whether a JSON key is true. name: the key in its quotes, which cannot occur inside a JSON string."""
    at = body.find(name)
    return at >= 0 and TRUE.match(body, at + len(name)) is not None


def event(**fields: Any) -> bytes:
    """One server-sent event of a chat stream, chunked."""
    shared = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    return chunk(b"data: " + json.dumps({**shared, **fields}, separators=(",", ":")).encode() + b"\n\n")


def delta(**fields: Any) -> bytes:
    """An event that continues the only choice."""
    reason = fields.pop("finish_reason", None)
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": reason}])


def usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}


WORD, LAST = delta(content=" word"), delta(content=" end", finish_reason="stop")
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
ANSWER = json.dumps(
    {
        "id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": MODEL, "usage": usage(EVENTS),
        "choices": [
            {
                "index": 0, "finish_reason": "stop",
                "message": {"role": "assistant", "content": " word" * EVENTS},
            }
        ],
    }
).encode()  # fmt: skip
MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm"}]}
INFO = {"model_path": MODEL, "model": MODEL, "tokenizer_path": "", "is_generation": True, "version": "0.32.0"}
PAGES = {
    b"/v1/models": MODELS, b"/health": {}, b"/health_generate": {}, b"/version": {"version": "0.32.0"},
    b"/server_info": INFO, b"/get_server_info": INFO, b"/model_info": INFO, b"/get_model_info": INFO,
}  # fmt: skip
"""Answers to GET; SMG finds out with them which engine a worker is."""
