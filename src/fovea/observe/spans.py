"""Spans of OpenTelemetry traces as values, their names, and the place of a request in a trace.

The header `traceparent` carries the place (W3C Trace Context). The names of attributes are those of
OpenTelemetry's conventions for generative AI, release gen-ai/1.42.0, which are still in development. What
they have no name for begins with `fovea.`. LEGACY are the attributes that vLLM wrote before the
conventions; dashboards made for vLLM read them (`--trace-legacy-names`). Only `otlp` knows the library that
exports spans.
"""

from __future__ import annotations

import random
import re
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


SCHEMA_URL = "https://opentelemetry.io/schemas/gen-ai/1.42.0"
PROVIDER = "fovea"

OPERATION = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
IMAGE_TOKENS = "gen_ai.usage.image.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"

SAMPLING = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}
"""Field of SamplingParams -> attribute."""

ERROR_TYPE = "error.type"
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"

REQUEST_ID = "fovea.request_id"
IMAGE_SIZES = "fovea.image.sizes"
IMAGE_VISUAL_TOKENS = "fovea.image.visual_tokens"
IMAGE_DETAIL = "fovea.image.detail"
CALLER = "fovea.caller"
TENANT = "fovea.tenant"
BACKEND = "fovea.backend"
ROUTE_REASON = "fovea.route.reason"
ATTEMPTS = "fovea.attempts"
CACHE = "fovea.response_cache"
VISUAL_TOKENS = "fovea.visual_tokens"

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/predict": "chat",
    "/invocations": "chat",
    "/v1/completions": "text_completion",
}
"""Route -> name of the operation. A span of another route is named by its method and path."""

LEGACY = {
    "request_id": "gen_ai.request.id",
    "num_sequences": "gen_ai.request.n",
    "prompt_tokens": "gen_ai.usage.prompt_tokens",
    "completion_tokens": "gen_ai.usage.completion_tokens",
    "queue": "gen_ai.latency.time_in_queue",
    "first_token": "gen_ai.latency.time_to_first_token",
    "total": "gen_ai.latency.e2e",
    "prefill": "gen_ai.latency.time_in_model_prefill",
    "decode": "gen_ai.latency.time_in_model_decode",
    "inference": "gen_ai.latency.time_in_model_inference",
}
"""Figure -> attribute of vLLM's traces."""
