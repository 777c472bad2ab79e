"""The step plan: the scheduler's decision about one step, as a value, and the budget from which it is made.

The runner executes a plan. From its composition the duration of a step is predicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fovea.engine.keep import Kept
from fovea.engine.kv.manager import Compaction, Move
from fovea.engine.schedule.itl_limit import PromptBudget
from fovea.engine.sequence import ImageSpan, Sequence, StateWork
from fovea.planner.cost import Composition, pairs_of


@dataclass(frozen=True, slots=True)
class Work:
    """An instruction to compute tokens of one sequence.

    seq: the sequence.
    start: position of the first token to compute.
    count: number of tokens.
    state: slots of the sequence's state; None: the model has no layers with a state.
    kept: what the sequence keeps after these tokens, which decide about it; None: all.
    """

    seq: Sequence
    start: int
    count: int
    state: StateWork | None = None
    kept: Kept | None = None

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def rows(self) -> int:
        """Rows of keys and values that the last token sees in layers without a window."""
        return self.start + self.count - self.seq.dropped

    @property
    def samples(self) -> bool:
        """Whether the step also chooses tokens, because none of prompt and answer remains to be computed."""
        return self.start + self.count >= self.seq.length

    @property
    def draft(self) -> int:
        """Number of drafts among the tokens."""
        ahead = self.start + self.count - self.seq.length
        return ahead if ahead > 0 else 0

    def split(self) -> tuple[Work, ...]:
        """Return the known tokens as one piece, and each draft as another, because each draft is verified."""
        if self.count == 1:
            return (self,)
        first = min(max(self.seq.length, self.start), self.stop)
        if first == self.stop:
            return (self,)
        apart = tuple(self._piece(place, place + 1) for place in range(first, self.stop))
        return (self._piece(self.start, first), *apart) if first > self.start else apart

    def _piece(self, start: int, stop: int) -> Work:
        state = None if self.state is None else self.state.between(start, stop)
        return Work(self.seq, start, stop - start, state)


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """An instruction to start or continue the encoding of one image.

    span: the image.
    holders: ids of the sequences that wait for it, in the order of their requests.
    """

    span: ImageSpan
    holders: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The scheduler's decision about one step.

    work: tokens to compute, decodes first.
    encode: images to encode, the most urgent first. How many of them are encoded in the step, and how much of
        each, depends on the time that the runner has.
    preempted: ids of the sequences that lost their blocks and wait again.
    encoded_ids: ids of the sequences that only wanted their images encoded, when all of them are.
    moves: copies of KV blocks, to be carried out in this order before anything is computed.
    """

    work: tuple[Work, ...] = ()
    encode: tuple[EncodeJob, ...] = ()
    preempted: tuple[str, ...] = ()
    encoded_ids: tuple[str, ...] = ()
    moves: tuple[Move | Compaction, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(item.count for item in self.work)

    def __bool__(self) -> bool:
        return bool(self.work or self.encode or self.encoded_ids or self.moves)

    @property
    def decodes(self) -> int:
        """Number of sequences that decode."""
        return sum(item.seq.decoding for item in self.work)


def composition_of(plan: StepPlan) -> Composition:
    """Return the composition of a plan. Call it before `Stepper.apply`, which changes the sequences."""
    decodes = context = tokens = chunks = pairs = 0
    for item in plan.work:
        if item.seq.decoding:
            decodes += item.count
            context += item.count * item.rows
        else:
            tokens += item.count
            chunks += 1
            pairs += pairs_of(item.start - item.seq.dropped, item.count)
    return Composition(decodes, context, tokens, chunks, pairs)


def composition_of_decodes(sequences: Iterable[Sequence]) -> Composition:
    """Return the composition of a step that only decodes, drafts included. Other sequences do not count."""
    rows = context = 0
    for seq in sequences:
        if seq.decoding:
            count = 1 + len(seq.drafts)
            rows += count
            context += count * (seq.computed_tokens - seq.dropped + count)
    return Composition(rows, context)


class Budget:
    """The state of one step while it is planned.

    tokens: tokens that can still be assigned.
    visual: visual tokens of images that can still be requested.
    prompts: what of the tokens may be tokens of prompts.
    work: tokens to compute, by sequence id.
    jobs: images to encode, by key.
    preempted: ids of the sequences that lost their blocks.
    encoded_ids: ids of the sequences that only wanted their images encoded, when all of them are.
    """

    def __init__(self, tokens: int, visual: int, prompts: PromptBudget | None = None) -> None:
        """prompts: None: prompts may use all tokens."""
        self.tokens = tokens
        self.prompts = prompts or PromptBudget(tokens)
        self.visual = visual
        self._all_visual = visual
        self.work: dict[str, Work] = {}
        self.jobs: dict[str, EncodeJob] = {}
        self.preempted: list[str] = []
        self.encoded_ids: list[str] = []

    @property
    def requested_visual(self) -> int:
        """Visual tokens of the images that have been requested so far."""
        return self._all_visual - self.visual

    def most(self, seq: Sequence) -> int:
        """Return the most tokens that a sequence may compute in this step."""
        if seq.decoding:
            return self.tokens
        return min(self.tokens, self.prompts.most(seq.computed_tokens, seq.missing_tokens))

    def take(self, work: Work) -> None:
        """Assign work to the step."""
        self.tokens -= work.count
        if not work.seq.decoding:
            self.prompts.take(work.start, work.count)
        self.work[work.seq.id] = work

    def refund(self, seq: Sequence) -> None:
        """Remove a sequence from the step. Images that no other sequence waits for are not encoded.

        The budget for prompts stays as it is: after a preemption no other sequence joins in the step.
        """
        work = self.work.pop(seq.id, None)
        if work is not None:
            self.tokens += work.count
        for key in list(self.jobs):
            job = self.jobs[key]
            if seq.id in job.holders:
                job.holders.remove(seq.id)
            if not job.holders:
                self.visual += job.span.rows
                del self.jobs[key]
