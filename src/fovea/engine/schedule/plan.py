"""What a step is: a value that the runner executes and the scheduler folds back in."""

from __future__ import annotations

from dataclasses import dataclass, field

from fovea.engine.sequence import ImageSpan, Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """Compute `count` tokens of `seq` from `start` on; `samples` when that leaves none wanted."""

    seq: Sequence
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def samples(self) -> bool:
        return self.stop == self.seq.length


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """Encode one image before the step's tokens; `holders` are the sequences that read it."""

    span: ImageSpan
    owner: Sequence
    holders: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """work: decodes first. preempted: sequences that lost their blocks and wait again."""

    work: tuple[Work, ...] = ()
    encode: tuple[EncodeJob, ...] = ()
    preempted: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(item.count for item in self.work)

    def __bool__(self) -> bool:
        return bool(self.work)
