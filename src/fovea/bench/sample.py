"""One request of the load generator: before it is sent, and as the client measured it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A chat request that is not sent yet.

    messages: the conversation, as JSON values of OpenAI's API.
    max_tokens: length of the answer. The answer has exactly this length where the server knows `ignore_eos`.
    label: class of requests in which this one is counted.
    images: number of images in the request.
    timeout: seconds after which this request is given up; None: the timeout of the run.
    priority: smaller is served first; 0 is not sent.
    salt: `cache_salt`, an extension of Fovea and vLLM: requests share caches only if their salts are equal;
        "" is not sent.
    """

    messages: tuple[Mapping[str, Any], ...]
    max_tokens: int
    label: str = "all"
    images: int = 0
    timeout: float | None = None
    priority: int = 0
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a request has no complete answer.

    kind: the class by which errors are counted: "http 429" (any status), "timeout", "unreachable",
        "broken stream", "no stream", "bad answer", "empty answer", "short stream", or "left" (the client
        closed the stream on purpose).
    text: the details, in the server's words where it sent any.
    """

    kind: str
    text: str


@dataclass(slots=True)
class Sample:
    """The measurements of one request. All times are seconds on one monotonic clock.

    due_at: when the request was to be sent; every latency counts from here.
    label, images: as in BenchRequest.
    requested_tokens: length of the answer that was requested.
    sent_at: when the request was really sent.
    events: when each piece of text arrived. Pieces that arrive in one read have one time.
    ended_at: when the request was over, with or without success.
    tokens, prompt_tokens, image_tokens, cached_tokens: counts from the server's usage; None where it sent
        none.
    unreduced_tokens: tokens that its images would have if none were left out; None: the server does not say.
    finish_reason: the server's reason for the end of the answer; "" without one.
    text_pieces: the text of the answer, one entry per event.
    failure: why there is no complete answer; None after success.
    """

    due_at: float
    label: str = "all"
    images: int = 0
    requested_tokens: int = 0
    sent_at: float = math.nan
    events: list[float] = field(default_factory=list)
    ended_at: float = math.nan
    tokens: int | None = None
    prompt_tokens: int | None = None
    image_tokens: int | None = None
    cached_tokens: int | None = None
    unreduced_tokens: int | None = None
    finish_reason: str = ""
    text_pieces: list[str] = field(default_factory=list, repr=False)
    failure: Failure | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the answer is complete."""
        return self.failure is None

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer: the server's count, or the number of events where it sent no count."""
        return len(self.events) if self.tokens is None else self.tokens

    @property
    def ttft(self) -> float:
        """Seconds from when the request was due to the first piece of text; nan without text."""
        return self.events[0] - self.due_at if self.events else math.nan

    @property
    def end_to_end(self) -> float:
        """Seconds from when the request was due to its end."""
        return self.ended_at - self.due_at

    @property
    def send_delay(self) -> float:
        """Seconds by which the load generator itself sent the request too late."""
        return self.sent_at - self.due_at

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive events."""
        return [b - a for a, b in zip(self.events, self.events[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first; nan for fewer than two tokens or events."""
        if self.output_tokens < 2 or len(self.events) < 2:
            return math.nan
        return (self.events[-1] - self.events[0]) / (self.output_tokens - 1)
