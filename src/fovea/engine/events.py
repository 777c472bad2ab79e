"""Messages from the engine's thread to the callers that wait for answers."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from fovea.core.types import FinishReason, StageTimings, TokenLogprob

NO_TIMINGS = StageTimings()


class SampledToken(NamedTuple):
    """One sampled token.

    logprob: log probability before any adjustment; None if the request did not ask for it.
    top: the most likely alternatives as (id, logprob), likeliest first.
    final: the answer is complete with this token, because its format allows no further one.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    final: bool = False


class PromptToken(NamedTuple):
    """The log probability of one token of a prompt.

    place: position of the token in the prompt.
    top: the most likely tokens of its place as (id, logprob), likeliest first.
    rank: 1 for the most likely token, 2 for the next one.
    """

    place: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int


class Reading(NamedTuple):
    """The text of some new tokens of an answer.

    text: the part that can be sent now; it may lag behind the tokens.
    logprobs: log probabilities of the tokens, if the request wants them.
    tokens: number of the tokens that belong to the answer. Those behind a stop string do not.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...]
    tokens: int


class Event(NamedTuple):
    """The result of one step for one choice.

    choice: number of the choice.
    picks: its new tokens.
    ended: the last of them ends the answer, and is not a part of its text.
    reading: text of the tokens; None: the receiver reads them.
    finish_reason: why the choice has ended; None: it goes on.
    stop: the stop string or token that ended the choice; None: another end, or none.
    error: an error, which ends the request.
    cached_tokens: prompt tokens whose KV came from the cache.
    prompt: log probabilities of tokens of the prompt, with the first token of the answer.
    timings: durations of the stages, in the choice's last event.
    """

    choice: int
    picks: Seq[SampledToken] = ()
    ended: bool = False
    reading: Reading | None = None
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    error: Exception | None = None
    cached_tokens: int = 0
    prompt: Seq[PromptToken] = ()
    timings: StageTimings = NO_TIMINGS


Sink = Callable[[Event], None]
"""Receives the events of a request, in the engine's thread. It must not block."""
