"""The order in which images are encoded, slice by slice, whoever computes the slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from fovea.engine.schedule.plan import EncodeJob


class PartlyEncoded(Protocol):
    """The state of an image between two slices. holders: ids of the sequences that wait for it."""

    holders: tuple[str, ...]


State = TypeVar("State", bound=PartlyEncoded)


class SliceQueue(Generic[State]):
    """Images that are partly encoded, by key.

    alive: tells whether a sequence still exists.
    """

    def __init__(self, alive: Callable[[str], bool]) -> None:
        self.states: dict[str, State] = {}
        self._alive = alive

    def update(self, jobs: Iterable[EncodeJob]) -> list[State]:
        """Take over the holders of the jobs. Returns the states that were dropped: nobody waits for them any more."""
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
        """Continue the images that have begun, then begin others. One slice is always computed, further ones while
        `fits` says that the next one ends in time."""
        first = True
        for job in sorted(jobs, key=lambda job: job.span.key not in self.states):
            while not complete(job):
                if not first and not fits():
                    return
                advance(job)
                first = False
