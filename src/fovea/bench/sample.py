"""One request, as its client saw it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Ask:
    """A request before it is sent.

    messages: OpenAI's, as JSON values. max_tokens: of the answer, which goes on so long where the server can be told so.
    label: the class it is counted in. images: how many it shows. timeout: seconds of its own; none: the run's.
    salt: an extension that Fovea and vLLM have: caches are shared with requests of the same salt only.
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
    """kind: what errors are counted by: "http 429", "timeout", "unreachable", "broken stream", "no stream",
    "bad answer", "empty answer", "short stream", "left" (by the client, on purpose). text: what exactly, in the server's words where it has any.
    """

    kind: str
    text: str


@dataclass(slots=True)
class Sample:
    """Times are of one monotonic clock, in seconds.

    scheduled: when it was due; every latency counts from here. sent: when it really left.
    events: when each piece of text came. Pieces that come in one read have one time.
    tokens, prompt_tokens, image_tokens, cached_tokens: as the server's usage says; none where it says nothing.
    wanted: tokens asked for. finish: the server's reason.
    """

    scheduled: float
    label: str = "all"
    images: int = 0
    wanted: int = 0
    sent: float = math.nan
    events: list[float] = field(default_factory=list)
    ended: float = math.nan
    tokens: int | None = None
    prompt_tokens: int | None = None
    image_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str = ""
    text: list[str] = field(default_factory=list, repr=False)
    failure: Failure | None = None

    @property
    def whole(self) -> bool:
        return self.failure is None

    @property
    def output(self) -> int:
        """Tokens of the answer: the server's count, else the events."""
        return len(self.events) if self.tokens is None else self.tokens

    @property
    def ttft(self) -> float:
        """Seconds to the first piece of text; nan before it."""
        return self.events[0] - self.scheduled if self.events else math.nan

    @property
    def end_to_end(self) -> float:
        return self.ended - self.scheduled

    @property
    def late(self) -> float:
        """Seconds that the load generator itself was late."""
        return self.sent - self.scheduled

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [b - a for a, b in zip(self.events, self.events[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first; nan for less than two."""
        if self.output < 2 or len(self.events) < 2:
            return math.nan
        return (self.events[-1] - self.events[0]) / (self.output - 1)
