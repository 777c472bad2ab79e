"""The state of one answer while it is generated: its tokens, and how many of them are computed.

There is no prefill phase and no decode phase. A sequence has a number of tokens in all and a number of tokens
that are computed. Each step, the scheduler lets it compute some of the missing ones. When none is missing,
the sampler adds a token, so that one is missing again. A prompt, a follow-up on a cached prefix, a
preempted sequence and a decode differ only in those two numbers.

A sequence may have drafts: tokens that are expected to follow its last one. They count as missing, too. One
step computes the last token and the drafts, and the sampler chooses a token after each of them. The drafts
that are equal to the chosen tokens are accepted. The first chosen token that differs from its draft ends the
step's tokens, and the KV of the drafts from there on is overwritten later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from fovea.core.sampling import SamplingParams
from fovea.core.types import Client, FinishReason
from fovea.engine.keep import NOTHING_DROPPED, WINDOW, KeepRule, Kept
from fovea.kernels import NO_SLOT


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The positions in the prompt of the visual tokens of one image, or of one group of a video's frames.

    index: number of the image in the prompt.
    start: first position of the span.
    length: number of positions; the span is [start, start + length).
    tokens: how many of these positions are visual tokens, that is, have the model's image token id.
    key: name of the encoder output in caches; it contains identity, processor plan and salt.
    grid: the (t, h, w) patch grid that M-RoPE positions follow; models with 1-D positions do not use it.
    kept_cells: cells of the merged grid that the tokens stand for, ascending; None for all cells.
    time: offset of the group's temporal positions from the beginning of its video.
    has_more: the next span continues the same video, and its positions begin where those of this span begin.
    full_tokens: for a reduced image, the number of tokens before the reduction; the encoder returns the
        remaining tokens with their places. 0 if the image is not reduced.
    states: rows of encoder output that cross-attention layers read; 0: it fills the visual tokens.
    """

    index: int
    start: int
    length: int
    tokens: int
    key: str
    grid: tuple[int, int, int]
    kept_cells: tuple[int, ...] | None = None
    time: int = 0
    has_more: bool = False
    full_tokens: int = 0
    states: int = 0

    @property
    def rows(self) -> int:
        """Rows of encoder output."""
        return self.states or self.tokens

    @property
    def encoder_rows(self) -> int:
        """Rows that the encoder computes: for a reduced image those before the reduction."""
        return max(self.rows, self.full_tokens)

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(slots=True)
class SequenceState:
    """The state of one running sequence.

    slot: slot that every step writes.
    source: slot that the next step reads: `slot`, or a checkpoint, or NOTHING for a state of zero.
    due: positions of the prompt that are still to be saved as checkpoints, ascending.
    drafts: slots of the states after each draft of the step.
    saves: checkpoints that the step writes: (position, slot, name).
    """

    slot: int
    source: int = NO_SLOT
    due: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    saves: list[tuple[int, int, bytes]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StateWork:
    """The slots of one sequence in a step.

    source: slot of the state before the step's first token; NOTHING: the state is zero.
    saves: (position, slot): after the token before that position, the state is written to the slot.
        Ascending; the last position is the end of the step's tokens.
    """

    source: int
    saves: tuple[tuple[int, int], ...]

    def between(self, start: int, stop: int) -> StateWork:
        """Return the part of the work for tokens [start, stop), which must begin at 0 or at a save."""
        before = [slot for position, slot in self.saves if position <= start]
        saves = tuple(save for save in self.saves if start < save[0] <= stop)
        return StateWork(before[-1] if before else self.source, saves)


class Drafts(NamedTuple):
    """Tokens that are expected to follow an answer.

    tokens: their ids.
    chances: for each of them, the probability that it and all before it are right.
    forced: how many of the first ones a grammar forces.
    drafter: who expects the others: a drafter of `engine.speculate`; "": nobody.
    """

    tokens: Seq[int] = ()
    chances: Seq[float] = ()
    forced: int = 0
    drafter: str = ""

    @classmethod
    def certain(cls, tokens: Seq[int]) -> Drafts:
        """Return tokens that a grammar forces."""
        return cls(tokens, [1.0] * len(tokens), len(tokens))


NO_DRAFTS = Drafts()
HINTS = "hints"
"""Name of the drafter that reads a request's prediction."""


class DraftUse(NamedTuple):
    """Counts of the drafts of an answer.

    computed, accepted: those that steps computed, and those that became part of the answer.
    hinted, accepted_hints: the part of them that the drafter `hints` expected.
    """

    computed: int = 0
    accepted: int = 0
    hinted: int = 0
    accepted_hints: int = 0

    def plus(self, other: DraftUse) -> DraftUse:
        """Return the sum of both counts."""
        return DraftUse(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def cut(self, tokens: int, *, predicted: bool) -> DraftUse:
        """Return the counts of an answer that has ended.

        tokens: accepted drafts that came after its end.
        predicted: whether its request has a prediction. Otherwise `hints` had another source.
        """
        accepted = self.accepted - tokens
        if not predicted:
            return DraftUse(self.computed, accepted)
        return self._replace(accepted=accepted, accepted_hints=min(self.accepted_hints, accepted))


NO_DRAFT_USE = DraftUse()


class Status(Enum):
    """The stage that a sequence has reached in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """The mutable state of one choice of one request.

    Only the scheduler and the KV manager write to it, and the stepper counts drafts. The job board writes to
    a sequence that never reached the scheduler.

    id: unique name of the sequence.
    prompt_ids, output_ids: token ids of the prompt, and those generated so far, which `append` adds.
    drafts: token ids that are expected to follow.
    chances: for each draft, the probability that it and all before it are right.
    forced, drafter: where they come from, see `Drafts`.
    speculate: whether drafters may propose drafts. Tokens that a grammar forces are drafts in any case.
    draft_use: counts of its drafts.
    sampling: how the next token is chosen.
    max_tokens: most tokens to generate.
    spans: positions of the prompt's images, in order.
    salt: separates the caches of clients; sequences with different salts share nothing.
    client: who sent it, see `GenerationRequest`.
    arrival: time at which the request arrived, in seconds on the engine's clock.
    deadline: time on the same clock at which the sequence expires; None for none.
    computed_tokens: number of tokens, from the start on, whose KV is computed.
    blocks: block table, the numbers of the KV blocks that the sequence uses.
    window_blocks: the same for layers with a sliding window (`kv.window_blocks`).
    block_hashes: names of the full blocks, as far as they are calculated.
    keep: which keys and values it keeps; None: all.
    kept: what it kept when the rule was applied last.
    dropped: tokens whose keys and values were left out, see `Kept`.
    state: slots of its state while it runs, if the model has layers with a state; None otherwise.
    status: waiting, running or finished.
    finish_reason: reason for the end; None until then.
    cached_tokens: tokens of the prompt that were found in the prefix cache.
    computed_elsewhere: tokens of the prompt that another engine has computed for it. They do not count as
        cached.
    reusable_tokens: tokens of the prompt that were in the prefix cache when it arrived.
    preemptions: how often the sequence lost its blocks and was sent back to the queue.
    priority: smaller numbers first, under the policy `priority`.
    encode_only: only encode the images; compute and generate nothing.
    scores_prompt: the log probabilities of its prompt are wanted, so all of the prompt is computed.
    times_passed: how many sequences that arrived later joined before this one.
    arrival_step, first_token_step: numbers of the steps in which it arrived and got its first token; 0 for
        not yet.
    length: number of tokens of prompt and answer, without drafts.
    """

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    spans: tuple[ImageSpan, ...] = ()
    salt: str = ""
    client: Client = ("", "")
    arrival: float = 0.0
    deadline: float | None = None
    output_ids: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    forced: int = 0
    drafter: str = ""
    speculate: bool = True
    draft_use: DraftUse = NO_DRAFT_USE
    computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    window_blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    keep: KeepRule | None = None
    kept: Kept = NOTHING_DROPPED
    dropped: int = 0
    state: SequenceState | None = None
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    computed_elsewhere: int = 0
    reusable_tokens: int = 0
    preemptions: int = 0
    priority: int = 0
    encode_only: bool = False
    scores_prompt: bool = False
    times_passed: int = 0
    arrival_step: int = 0
    first_token_step: int = 0
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.prompt_ids) + len(self.output_ids)

    def continue_from(self, kept: Kept) -> None:
        """Set what is kept. The caller sets `blocks` to the blocks of these rows."""
        self.kept, self.dropped = kept, kept.dropped

    def decides_from(self, point: int) -> int:
        """The first of the tokens before a point of `keep` that decide what is kept.

        They do not reach back into an image that ends before the point, or into what was kept before.
        """
        begin = max(self.kept.until, point - WINDOW)
        ends = (span.end for span in self.spans_between(begin, point) if span.end < point)
        return max(ends, default=begin)

    def append(self, tokens: Seq[int]) -> None:
        """Add generated tokens."""
        self.output_ids.extend(tokens)
        self.length += len(tokens)

    @property
    def missing_tokens(self) -> int:
        """Number of tokens that are not computed yet, drafts included."""
        return self.length + len(self.drafts) - self.computed_tokens

    @property
    def decoding(self) -> bool:
        """Whether all tokens but the newest one of the answer are computed. Drafts do not count."""
        if not self.output_ids:
            return False
        return self.computed_tokens == self.length - 1

    def expect(self, drafts: Drafts) -> None:
        """Set the drafts, as far as the answer has room for them and for the token after them."""
        self.keep_drafts(0)
        if drafts.tokens:
            room = max(0, self.max_tokens - len(self.output_ids) - 1)
            self.drafts, self.chances = list(drafts.tokens[:room]), list(drafts.chances[:room])
            self.forced, self.drafter = min(drafts.forced, room), drafts.drafter

    def count_drafts(self, computed: int, accepted: int) -> None:
        """Count the drafts that a step computed and accepted, before the next ones are expected."""
        forced, by_hints = self.forced, self.drafter == HINTS
        hinted = max(0, computed - forced) if by_hints else 0
        accepted_hints = max(0, accepted - forced) if by_hints else 0
        self.draft_use = self.draft_use.plus(DraftUse(computed, accepted, hinted, accepted_hints))

    def keep_drafts(self, count: int) -> None:
        """Forget all drafts but the first `count`."""
        if self.drafts:
            self.drafts, self.chances = self.drafts[:count], self.chances[:count]
            self.forced = min(self.forced, count)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids in [start, stop): prompt, answer, drafts."""
        prompt = len(self.prompt_ids)
        if stop <= prompt:
            return self.prompt_ids[start:stop]
        later = self.output_ids if stop <= self.length else self.output_ids + self.drafts
        if start >= prompt:
            return later[start - prompt : stop - prompt]
        return self.prompt_ids[start:] + later[: stop - prompt]

    def visual_between(self, start: int, stop: int) -> int:
        """Number of positions in [start, stop) that belong to an image."""
        spans = self.spans_between(start, stop)
        return sum(min(span.end, stop) - max(span.start, start) for span in spans)

    def spans_between(self, start: int, stop: int) -> Seq[ImageSpan]:
        """The image spans that overlap [start, stop).

        Spans are in order and do not overlap, so only those are read: a video may have thousands, and this is
        asked for every block of its prompt.
        """
        if not self.spans:
            return ()
        first = last = bisect_right(self.spans, start, key=_end)
        while last < len(self.spans) and self.spans[last].start < stop:
            last += 1
        return self.spans[first:last]


def _end(span: ImageSpan) -> int:
    return span.end
