"""Jobs, and the events that the engine's thread sends to the callers that wait for their answers.

A job is a sequence on its way through the engine, with what only its client cares about.
"""

from __future__ import annotations

from asyncio import Queue
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fovea.core.types import FinishReason, StageTimings, TokenLogprob
from fovea.engine.sequence import NO_DRAFT_USE, DraftUse, Sequence

if TYPE_CHECKING:
    from fovea.engine.grammar.compiler import Grammar
    from fovea.engine.request.answer import AnswerReader
    from fovea.engine.vision.encoding import VisualFeatures
    from fovea.engine.vision.processor.base import ProcessedImage


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
    tokens: number of the tokens that belong to the answer. Those after a stop string do not.
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
    dropped_tokens: tokens whose keys and values were left out, in the choice's last event.
    drafts: counts of the choice's drafts, in its last event.
    offers: values that another engine can fetch.
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
    dropped_tokens: int = 0
    drafts: DraftUse = NO_DRAFT_USE
    offers: Seq[Mapping[str, Any]] = ()


LATE = 32
"""Number of events from which on a receiver is behind."""


async def take_waiting(events: Queue[Event]) -> list[Event]:
    """Wait for an event of a request. If LATE others wait, return all, those of each choice joined into one.

    A receiver that is slower than the engine gets many steps at once. Text, HTTP and the work of the event
    loop cost as much for several tokens as for one, so it catches up. Otherwise events would pile up, and an
    event loop that is always busy answers no new request.
    """
    waiting = [await events.get()]
    if events.qsize() < LATE:
        return waiting
    while not events.empty():
        waiting.append(events.get_nowait())
    return join_events(waiting)


def join_events(events: Seq[Event]) -> list[Event]:
    """Join the events of each choice. An error, or an abort, stays an event of its own behind the tokens."""
    joined: dict[int, Event] = {}
    for event in events:
        if event.error is not None or event.finish_reason == "abort":
            return [*joined.values(), event]
        before = joined.get(event.choice)
        joined[event.choice] = event if before is None else _join(before, event)
    return list(joined.values())


def _join(first: Event, second: Event) -> Event:
    reading = second.reading
    if first.reading is not None and reading is not None:
        reading = Reading(
            first.reading.text + reading.text,
            first.reading.logprobs + reading.logprobs,
            first.reading.tokens + reading.tokens,
        )
    picks, prompt = (*first.picks, *second.picks), (*first.prompt, *second.prompt)
    offers = (*first.offers, *second.offers)
    return second._replace(picks=picks, reading=reading, prompt=prompt, offers=offers)


class Export(Protocol):
    """The values that a sequence offers to another engine."""

    def take(self, seq: Sequence) -> list[Mapping[str, Any]]:
        """Offer what has become ready, and return the offers as JSON."""
        ...


Sink = Callable[[Event], None]
"""Receives the events of a request, in the engine's thread. It must not block."""


PixelSource = Callable[[], "ProcessedImage"]
"""Makes the pixels of one image when the encoder needs them."""


@dataclass(slots=True)
class SequenceInputs:
    """An executor's inputs for one sequence, beside its tokens.

    choice: number of the answer within its request; it selects the sequence's random stream.
    pixels: one source per image, by span key.
    features: encoder outputs that were read from slower tiers, by span key. An entry is removed when it moves
        to the encoder-output cache, or when it is no longer needed.
    grammar: what the answer must follow; None: nothing.
    bad_words: tokens that must not occur one after the other in the answer.
    grammar_after: tokens that end the model's reasoning, after which the grammar begins; (): at once.
    prediction: tokens that the answer is likely to contain; (): nothing is known of it.
    """

    choice: int = 0
    pixels: dict[str, PixelSource] = field(default_factory=dict)
    features: dict[str, VisualFeatures] = field(default_factory=dict)
    grammar: Grammar | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar_after: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()


@dataclass(slots=True)
class Job:
    """One choice of a request while it is inside the engine.

    `admitted`, `first_token` and `last_token` are times on the monotonic clock of `seq.arrival`; fields that
    end in `_s` are durations in seconds.

    sink: receives the job's events.
    choice: number of the answer within its request.
    reader: turns the job's tokens into text.
    fetch_s, media_decode_s: spent before the request arrived in the engine.
    decode_s, preprocess_s: spent after it: decoding images; template, tokens and pixels.
    encode_s: time that the encoder spent on the images for which this job was the first to wait.
    scored: log probabilities of tokens of the prompt, until the first token is sent.
    encoded_before_s: the part of encode_s that was spent before the sequence was admitted.
    export: offers its results to another engine; None: nobody asked for them.
    """

    seq: Sequence
    inputs: SequenceInputs
    sink: Sink
    reader: AnswerReader
    fetch_s: float = 0.0
    media_decode_s: float = 0.0
    decode_s: float = 0.0
    preprocess_s: float = 0.0
    encode_s: float = 0.0
    encoded_before_s: float = 0.0
    scored: list[PromptToken] = field(default_factory=list)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    export: Export | None = None
    choice: int = field(init=False)

    def __post_init__(self) -> None:
        self.choice = self.inputs.choice

    @property
    def request(self) -> str:
        """The id of the request, without the number of the choice."""
        return self.seq.id.rpartition(":")[0]

    @property
    def timings(self) -> StageTimings:
        """Durations of all stages but detokenizing, which the reader knows."""
        admitted = self.admitted or self.seq.arrival
        first = self.first_token or self.last_token
        prepared_s = self.decode_s + self.preprocess_s
        return StageTimings(
            fetch=self.fetch_s,
            media_decode=self.media_decode_s + self.decode_s,
            preprocess=self.preprocess_s,
            queue=max(0.0, admitted - self.seq.arrival - prepared_s - self.encoded_before_s),
            encode=self.encode_s,
            prefill=max(0.0, first - admitted - (self.encode_s - self.encoded_before_s)),
            decode=self.last_token - first,
            ttft=first - self.seq.arrival,
        )
