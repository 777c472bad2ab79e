"""The step plan: the scheduler's decision about one step, as a value. The runner executes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from fovea.engine.kv.moves import Move
from fovea.engine.sequence import ImageSpan, Sequence, StateWork


@dataclass(frozen=True, slots=True)
class Work:
    """An instruction to compute tokens of one sequence.

    seq: the sequence.
    start: position of the first token to compute.
    count: number of tokens.
    state: slots of the sequence's state; None: the model has no layers with a state.
    """

    seq: Sequence
    start: int
    count: int
    state: StateWork | None = None

    @property
    def stop(self) -> int:
        return self.start + self.count

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
    moves: tuple[Move, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(item.count for item in self.work)

    def __bool__(self) -> bool:
        return bool(self.work or self.encode or self.encoded_ids or self.moves)

    @property
    def decodes(self) -> int:
        """Number of sequences that decode."""
        return sum(item.seq.decoding for item in self.work)
