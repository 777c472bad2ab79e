"""What the engine's thread tells whoever waits for an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fovea.core.types import FinishReason, StageTimings, TokenLogprob


@dataclass(frozen=True, slots=True)
class Event:
    """One step's news of one choice. `error` ends the request; `finish_reason` ends the choice."""

    choice: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    cached_tokens: int = 0
    timings: StageTimings = StageTimings()


Sink = Callable[[Event], None]
