"""Messages from the engine's thread to the callers that wait for answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fovea.core.types import FinishReason, StageTimings, TokenLogprob


@dataclass(frozen=True, slots=True)
class Event:
    """The result of one step for one choice.

    choice: number of the choice.
    text, token_ids, logprobs: the new part of the answer; text may lag behind the tokens.
    finish_reason: why the choice has ended; None: it goes on.
    stop: the stop string or token that ended the choice; None: another end, or none.
    error: an error, which ends the request.
    cached_tokens: prompt tokens whose KV came from the cache.
    prompt: log probabilities of tokens of the prompt by position, with the first token of the answer.
    timings: durations of the stages, in the choice's last event.
    """

    choice: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    error: Exception | None = None
    cached_tokens: int = 0
    timings: StageTimings = StageTimings()
    prompt: Mapping[int, TokenLogprob] = field(default_factory=dict)


Sink = Callable[[Event], None]
"""Receives the events of a request, in the engine's thread. It must not block."""
