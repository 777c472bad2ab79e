"""A finished span, as a value. Only `otlp` knows the library that exports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Attribute = str | int | float | bool | Sequence[str] | Sequence[int]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened at one moment of a span. at: seconds since 1970."""

    name: str
    at: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """One span.

    start, end: seconds since 1970.
    parent_id: "": the root of its trace.
    kind: "server", "client" or "internal".
    error: what went wrong; "": nothing.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    kind: str = "internal"
    error: str = ""
    state: str = ""
    events: tuple[SpanEvent, ...] = ()
