"""The order of slices: begun images first, at least one slice per step, no images without sequences."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fovea.engine.schedule.plan import EncodeJob
from fovea.engine.step.executor import SliceQueue
from tests.support.brains import image

SLICES = 3


@dataclass
class Progress:
    """The state of an image: its holders, and the number of slices that are computed."""

    holders: tuple[str, ...]
    slices: int = 0


class Encoder:
    """Computes slices of images, SLICES for each; `fits_left` further slices fit into the step."""

    def __init__(self, *alive: str) -> None:
        self.alive = set(alive)
        self.queue: SliceQueue[Progress] = SliceQueue(self.alive.__contains__)
        self.computed: list[str] = []
        self.complete: set[str] = set()

    def step(self, *jobs: EncodeJob, further: int = 0) -> str:
        """Run one step. Returns the keys of the computed slices, in order."""
        self.queue.update(jobs)
        computed: list[str] = []

        def advance(job: EncodeJob) -> None:
            key = job.span.key
            state = self.queue.states.setdefault(key, Progress(tuple(job.holders)))
            state.slices += 1
            computed.append(key)
            if state.slices == SLICES:
                self.complete.add(key)
                del self.queue.states[key]

        self.queue.run(
            jobs,
            complete=lambda job: job.span.key in self.complete,
            advance=advance,
            fits=lambda: len(computed) <= further,
        )
        return "".join(computed)


def job(key: str, *holders: str) -> EncodeJob:
    return EncodeJob(image(0, 4, key), list(holders or ("s1",)))


@pytest.mark.parametrize("further", [0, 1, 2])
def test_one_slice_is_always_computed_and_further_ones_while_they_fit(further: int) -> None:
    encoder = Encoder("s1")
    assert encoder.step(job("a"), further=further) == "a" * (1 + further)


def test_without_jobs_nothing_is_computed() -> None:
    assert Encoder().step(further=9) == ""


def test_images_are_encoded_in_the_order_of_the_jobs() -> None:
    encoder = Encoder("s1")
    assert encoder.step(job("b"), job("a"), further=9) == "bbbaaa"
    assert encoder.queue.states == {}


def test_a_partly_encoded_image_continues_before_others_begin() -> None:
    encoder = Encoder("s1")
    assert encoder.step(job("a")) == "a"
    assert encoder.step(job("b"), job("c"), job("a"), further=3) == "aabb"
    assert encoder.step(job("c"), job("b"), further=1) == "bc"


def test_a_complete_image_is_not_encoded_again() -> None:
    encoder = Encoder("s1")
    encoder.complete.add("a")
    assert encoder.step(job("a"), job("b")) == "b"


def test_an_image_whose_sequences_are_gone_is_dropped() -> None:
    encoder = Encoder("s1", "s2")
    encoder.step(job("a", "s1"))
    encoder.step(job("b", "s2"))
    assert list(encoder.queue.states) == ["a", "b"]
    encoder.alive.discard("s1")
    assert encoder.queue.update([]) == [Progress(("s1",), 1)]
    assert list(encoder.queue.states) == ["b"], "its sequence still exists"


def test_an_image_stays_while_one_of_its_sequences_exists() -> None:
    encoder = Encoder("s1", "s2")
    encoder.step(job("a", "s1", "s2"))
    encoder.alive.discard("s1")
    assert encoder.queue.update([]) == []
    encoder.alive.discard("s2")
    assert len(encoder.queue.update([])) == 1


def test_an_image_takes_over_the_sequences_of_its_job() -> None:
    """A second request needs an image that the first one began; then the first one leaves."""
    encoder = Encoder("s1", "s2")
    encoder.step(job("a", "s1"))
    encoder.queue.update([job("a", "s1", "s2")])
    assert encoder.queue.states["a"].holders == ("s1", "s2")
    encoder.alive.discard("s1")
    assert encoder.queue.update([]) == []
    assert encoder.step(job("a", "s2"), further=9) == "aa", "the first slice is kept"
