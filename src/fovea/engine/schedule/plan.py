"""What a step is: a value that the runner executes and the scheduler folds back in."""

from __future__ import annotations

from dataclasses import dataclass, field

from fovea.engine.kv.moves import Move
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
    """Go on encoding one image; `holders` are the sequences that wait for it, the one who asked first in front."""

    span: ImageSpan
    holders: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """work: decodes first. encode: images in the order in which they are wanted; how many of them, and how much of each,
    is a matter of time, which the runner has. preempted: sequences that lost their blocks and wait again.
    done: sequences that only wanted their images encoded, and they are.
    moves: of KV blocks, in this order and before anything is computed.
    """

    work: tuple[Work, ...] = ()
    encode: tuple[EncodeJob, ...] = ()
    preempted: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(item.count for item in self.work)

    def __bool__(self) -> bool:
        return bool(self.work or self.encode or self.done or self.moves)

    @property
    def decodes(self) -> int:
        return sum(item.seq.decoding for item in self.work)
