"""The order in which images are encoded, slice by slice. Real and simulated encoders both use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from fovea.engine.schedule.plan import EncodeJob


class PartlyEncoded(Protocol):
    """The state of an image between two slices.

    holders: ids of the sequences that wait for it.
    """

    holders: tuple[str, ...]


State = TypeVar("State", bound=PartlyEncoded)


class SliceQueue(Generic[State]):
    """The partly encoded images.

    alive: tells whether the sequence with an id still exists.
    states: by image key.
    """

    def __init__(self, alive: Callable[[str], bool]) -> None:
        self.states: dict[str, State] = {}
        self._alive = alive

    def update(self, jobs: Iterable[EncodeJob]) -> list[State]:
        """Replace the holders of each image by those of its job, and drop images that no sequence waits for.

        An image without a job stays as long as one of its holders exists. Returns the dropped states.
        """
        wanted = {job.span.key: job for job in jobs}
        dropped = []
        for key, state in list(self.states.items()):
            if key in wanted:
                state.holders = tuple(wanted[key].holders)
            elif not any(map(self._alive, state.holders)):
                dropped.append(self.states.pop(key))
        return dropped

    def run(
        self,
        jobs: Sequence[EncodeJob],
        *,
        complete: Callable[[EncodeJob], bool],
        advance: Callable[[EncodeJob], None],
        fits: Callable[[], bool],
    ) -> None:
        """Continue partly encoded images first, then begin others. At least one slice is computed.

        complete: tells whether an image is encoded, or has failed.
        advance: computes one slice of an image.
        fits: tells whether one more slice ends in time.
        """
        first = True
        for job in sorted(jobs, key=lambda job: job.span.key not in self.states):
            while not complete(job):
                if not first and not fits():
                    return
                advance(job)
                first = False
