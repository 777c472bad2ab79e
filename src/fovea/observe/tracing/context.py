"""The place of a request in a trace, and the header `traceparent` that carries it (W3C Trace Context)."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_LONGEST_STATE = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The place of one server's work in a trace.

    trace_id: 32 hex digits.
    span_id: 16 hex digits, of the span of this work.
    parent_id: of the caller's span; "": the trace begins here.
    state: the header tracestate, which is passed on unchanged.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    state: str = ""

    def header(self, span_id: str = "") -> str:
        """Return the header traceparent for a call made within this span, or within another one."""
        return f"00-{self.trace_id}-{span_id or self.span_id}-01"


@dataclass(frozen=True, slots=True)
class Parent:
    """A valid header traceparent.

    sampled: whether the caller records the trace.
    """

    trace_id: str
    span_id: str
    sampled: bool


def parent_of(headers: Mapping[bytes, bytes]) -> Parent | None:
    """Return the caller's place in a trace; None: it named none, or the header is not valid."""
    header = headers.get(TRACEPARENT)
    match = None if header is None else _PARENT.fullmatch(header.strip())
    if match is None:
        return None
    version, trace, span, flags, rest = match.groups()
    if version == b"ff" or (version == b"00" and rest) or not trace.strip(b"0") or not span.strip(b"0"):
        return None
    return Parent(trace.decode(), span.decode(), bool(int(flags, 16) & 1))


def context_of(headers: Mapping[bytes, bytes], parent: Parent | None, share: float) -> TraceContext | None:
    """Return the place of a request in a trace; None: it is not recorded.

    A caller's decision is followed. Without a caller that decides, `share` of the requests are recorded.
    """
    if parent is not None:
        if not parent.sampled:
            return None
        state = headers.get(TRACESTATE, b"").decode("latin-1")
        state = state if len(state) <= _LONGEST_STATE else ""  # a part of it could mean something else
        return TraceContext(parent.trace_id, new_span_id(), parent.span_id, state)
    if share < 1 and random.random() >= share:
        return None
    return TraceContext(f"{random.getrandbits(128) or 1:032x}", new_span_id())


def recorded_id(context: TraceContext | None, parent: Parent | None) -> str:
    """Return the id of the trace that is recorded here or by the caller; "": there is none."""
    if context is not None:
        return context.trace_id
    return parent.trace_id if parent is not None and parent.sampled else ""


def unrecorded() -> str:
    """Return a header traceparent of a new trace that nobody records."""
    return f"00-{random.getrandbits(128) or 1:032x}-{new_span_id()}-00"


def new_span_id() -> str:
    """Return a random id of a span."""
    return f"{random.getrandbits(64) or 1:016x}"
