"""Slices on a stream: how many are launched beside a step, and when an image is handed over."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fovea.core.errors import OutOfMemory
from fovea.engine.execute.encode_queue import EncodeQueue, EncodeResult
from fovea.engine.schedule.plan import EncodeJob
from fovea.engine.sequence import ImageSpan
from fovea.engine.vision.calls import ProjectorLayer, apply_by_rows
from fovea.engine.vision.encoding import (
    EncoderStream,
    InlineStream,
    Slices,
    UpcomingImages,
    VisualFeatures,
    encoder_stream,
)
from fovea.engine.vision.processor.base import ProcessedImage

SLICES = 3


@dataclass
class FakeStream:
    """A device that finishes slices when a test says so. A slice takes one second of its clock."""

    events: list[str] = field(default_factory=list)
    marks: list[FakeMark] = field(default_factory=list)
    finished: int = 0
    inside: bool = False
    batch_rows: int = 0

    @contextmanager
    def activate(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def mark(self) -> FakeMark:
        assert self.inside
        self.marks.append(FakeMark(self, len(self.marks)))
        return self.marks[-1]

    def hand_over(self, features: VisualFeatures) -> None:
        self.events.append("handed over")

    def finish(self, slices: int) -> None:
        self.finished += 2 * slices


@dataclass(eq=False)
class FakeMark:
    stream: FakeStream
    number: int

    @property
    def done(self) -> bool:
        return self.number < self.stream.finished

    def wait(self) -> None:
        self.stream.events.append("waited")
        self.stream.finished = self.number + 1

    def since(self, earlier: Any) -> float:
        assert self.done
        assert earlier.done
        return 0.5 * (self.number - earlier.number) * 2


class Tower:
    """An encoder of three slices per image, over a stream."""

    def __init__(self, stream: EncoderStream) -> None:
        self.begun: list[str] = []
        self.ahead: list[list[str]] = []
        self.slices = 0
        self.closed: list[str] = []
        self.alive = {"s1", "s2"}
        self.rows = 2
        self.encoder = EncodeQueue(
            self.encode, stream, pixels=self.pixels, alive=lambda holder: holder in self.alive
        )

    def pixels(self, job: EncodeJob) -> ProcessedImage:
        if job.span.key == "broken":
            raise ValueError("these are no pixels")
        return ProcessedImage(job.span.key, None, {})  # type: ignore[arg-type]

    def encode(self, image: ProcessedImage, ahead: UpcomingImages) -> Slices[VisualFeatures]:
        self.begun.append(image.identity)
        self.ahead.append([other.identity for other in ahead()])
        try:
            for _ in range(SLICES - 1):
                self.slices += 1
                yield
            self.slices += 1
        except GeneratorExit:
            self.closed.append(image.identity)
            raise
        return VisualFeatures(torch.zeros(self.rows, 4))


def job(key: str, *holders: str) -> EncodeJob:
    return EncodeJob(ImageSpan(0, 0, 2, 2, key, (1, 2, 4)), list(holders or ("s1",)))


def test_on_a_cpu_an_image_is_handed_over_when_its_last_slice_returns() -> None:
    assert isinstance(encoder_stream(torch.device("cpu")), InlineStream)
    tower = Tower(InlineStream())
    result = tower.encoder.step([job("a", "s1", "s2"), job("b")], 60.0, alone=False)
    assert list(result.images) == ["a", "b"]
    assert result.images["a"].holders == {"s1", "s2"}
    assert result.seconds >= result.images["a"].seconds + result.images["b"].seconds > 0
    assert not tower.encoder.working


def test_the_encoder_sees_which_reduced_images_come_next() -> None:
    """Partly encoded and plain images are not among them. An image without pixels fails at its own turn."""
    tower = Tower(InlineStream())
    tower.encoder.step([job("a")], 0.0, alone=False)
    wanted = [job("a"), job("plain"), *(reduced_job(key) for key in ("b", "broken", "c"))]
    tower.encoder.step(wanted, 0.0, alone=False)
    assert tower.ahead == [[]]
    result = tower.encoder.step(wanted, 60.0, alone=False)
    assert tower.begun == ["a", "plain", "b", "c"]
    assert tower.ahead == [[], ["b", "c"], ["c"], []]
    assert list(result.failures) == ["broken"]


def reduced_job(key: str) -> EncodeJob:
    """An image that keeps two of eight tokens."""
    return EncodeJob(ImageSpan(0, 0, 2, 2, key, (1, 2, 4), full_tokens=8), ["s1"])


def test_a_step_without_seconds_computes_one_slice() -> None:
    tower = Tower(InlineStream())
    for slices in range(1, SLICES + 1):
        result = tower.encoder.step([job("a")], 0.0, alone=False)
        assert tower.slices == slices
        assert bool(result.images) == (slices == SLICES)


def test_a_partly_encoded_image_is_finished_first() -> None:
    tower = Tower(InlineStream())
    tower.encoder.step([job("a")], 0.0, alone=False)
    tower.encoder.step([job("b"), job("a")], 0.0, alone=False)
    assert tower.begun == ["a"]


def test_a_step_with_tokens_does_not_wait_and_hands_nothing_over_early() -> None:
    stream = FakeStream()
    tower = Tower(stream)
    result = tower.encoder.step([job("a")], 60.0, alone=False)
    assert (tower.slices, result.images, stream.events) == (SLICES, {}, []), "launched, but not done"
    for _ in range(3):
        assert not tower.encoder.step([job("a"), job("b")], 60.0, alone=False).images
    assert tower.begun == ["a"], "no further slices before these are done"
    stream.finish(SLICES - 1)
    assert not tower.encoder.step([job("a")], 60.0, alone=False).images, "its last slice is not done"
    stream.finish(1)
    result = tower.encoder.step([job("a"), job("b")], 60.0, alone=False)
    assert list(result.images) == ["a"]
    assert result.images["a"].seconds == SLICES
    assert stream.events == ["handed over"]
    assert tower.begun == ["a", "b"]


def test_a_step_launches_as_many_slices_as_its_seconds_allow() -> None:
    """A slice takes one second on this device. That is known once the first slices are done."""
    stream = FakeStream()
    tower = Tower(stream)
    tower.encoder.step([job("a")], 60.0, alone=False)
    stream.finish(SLICES)
    tower.encoder.step([job("b"), job("c")], 2.5, alone=False)
    assert tower.slices == SLICES + 2
    stream.finish(2)
    tower.encoder.step([job("b"), job("c")], 0.1, alone=False)
    assert tower.slices == SLICES + 3, "at least one slice"


def test_a_step_without_tokens_waits_for_its_slices() -> None:
    stream = FakeStream()
    tower = Tower(stream)
    result = tower.encoder.step([job("a")], 60.0, alone=True)
    assert list(result.images) == ["a"]
    assert stream.events == ["waited", "handed over"]


def test_an_image_whose_sequences_are_gone_is_dropped() -> None:
    stream = FakeStream()
    tower = Tower(stream)
    tower.encoder.step([job("a", "s1")], 0.0, alone=True)
    tower.alive.discard("s1")
    assert tower.encoder.working
    tower.encoder.step([job("b", "s2")], 0.0, alone=True)
    assert tower.closed == ["a"]
    tower.encoder.drop()
    assert tower.encoder.working, "s2 is still there"
    tower.alive.clear()
    tower.encoder.drop()
    assert not tower.encoder.working


def test_a_sequence_that_has_left_holds_nothing() -> None:
    stream = FakeStream()
    tower = Tower(stream)
    tower.encoder.step([job("a", "s1", "s2")], 60.0, alone=False)
    tower.alive.discard("s1")
    stream.finish(SLICES)
    assert tower.encoder.step([], 60.0, alone=False).images["a"].holders == {"s2"}


@pytest.mark.parametrize("stream", [InlineStream(), FakeStream()])
def test_an_image_that_fails_fails_alone(stream: EncoderStream) -> None:
    tower = Tower(stream)
    result = tower.encoder.step([job("broken"), job("a")], 60.0, alone=True)
    assert (list(result.failures), list(result.images)) == (["broken"], ["a"])
    tower.rows = 1
    result = tower.encoder.step([job("b")], 60.0, alone=True)
    assert "1 rows encoded, 2 planned" in str(result.failures["b"])
    assert not tower.encoder.working


def test_the_projector_is_measured_apart_and_only_its_own_calls_count() -> None:
    class Projected(Tower):
        def encode(self, image: ProcessedImage, ahead: UpcomingImages) -> Slices[VisualFeatures]:
            yield
            rows = yield from apply_by_rows(ProjectorLayer(lambda x: x), torch.zeros(2, 4))
            return VisualFeatures(rows)

    stream = FakeStream()
    tower = Projected(stream)
    work = [job("a", "s1")]
    tower.encoder.step(work, 100, alone=False)
    stream.finished = len(stream.marks)
    image = tower.encoder.step(work, 0, alone=False).images["a"]
    # Marks 0 and 1 are those of the tower's slice; 2 to 5 of the projector's, its call in the middle; 6 and 7
    # of the last.
    assert image.seconds == 1 + 3 + 1
    assert image.projected == 1

    plain_stream = FakeStream()
    plain = Tower(plain_stream)
    plain.encoder.step(work, 100, alone=False)
    plain_stream.finished = len(plain_stream.marks)
    assert plain.encoder.step(work, 0, alone=False).images["a"].projected is None
    ProjectorLayer(lambda x: x)(torch.zeros(1))
    assert len(plain_stream.marks) == 2 * SLICES, "outside a queue nothing is measured"


class Joined(Tower):
    """An encoder of one layer, which is computed for several images together."""

    def __init__(self, stream: EncoderStream) -> None:
        super().__init__(stream)
        self.calls: list[int] = []
        self.refused = -1.0

    def encode(self, image: ProcessedImage, ahead: UpcomingImages) -> Slices[VisualFeatures]:
        self.begun.append(image.identity)
        value = float(ord(image.identity[0]))
        rows = yield from apply_by_rows(self.layer, torch.full((2, 4), value))
        return VisualFeatures(rows)

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(x))
        if (x == self.refused).any():
            raise RuntimeError("a layer is broken")
        return x + 1


def test_images_of_a_step_are_encoded_together_as_far_as_they_fit() -> None:
    stream = FakeStream(batch_rows=6)
    tower = Joined(stream)
    work = [job(key) for key in "abcde"]
    result = tower.encoder.step(work, 60.0, alone=True)
    assert tower.calls == [6, 4]
    assert list(result.images) == ["a", "b", "c", "d", "e"]
    for key, image in result.images.items():
        assert image.features.embeds.unique().tolist() == [ord(key) + 1]
        assert image.features.embeds.untyped_storage().nbytes() == image.features.embeds.nbytes
    assert [image.seconds for image in result.images.values()] == [1 / 3] * 3 + [1 / 2] * 2


def test_reduced_images_are_encoded_by_themselves() -> None:
    tower = Joined(FakeStream(batch_rows=100))
    tower.encoder.step([job("a"), reduced_job("b"), job("c"), reduced_job("d")], 60.0, alone=True)
    assert tower.begun == ["a", "c", "b", "d"]
    assert tower.calls == [4, 2, 2]


def test_a_batch_that_fails_is_tried_again_image_by_image() -> None:
    """Only the guilty image fails; the next step encodes others together again."""
    tower = Joined(FakeStream(batch_rows=100))
    tower.refused = float(ord("b"))
    result = tower.encoder.step([job(key) for key in "abc"], 60.0, alone=True)
    assert (list(result.images), list(result.failures)) == (["a", "c"], ["b"])
    assert tower.calls == [6, 2, 2, 2]
    assert not tower.encoder.working
    tower.encoder.step([job(key) for key in "de"], 60.0, alone=True)
    assert tower.calls[4:] == [4]


def test_an_image_of_a_batch_whose_sequences_are_gone_is_dropped() -> None:
    class Pausing(Joined):
        def encode(self, image: ProcessedImage, ahead: UpcomingImages) -> Slices[VisualFeatures]:
            yield None
            return (yield from super().encode(image, ahead))

    stream = FakeStream(batch_rows=100)
    tower = Pausing(stream)
    tower.encoder.step([job("a", "s1"), job("b", "s2")], 0.0, alone=True)
    tower.alive.discard("s1")
    result = tower.encoder.step([job("b", "s2")], 60.0, alone=True)
    assert list(result.images) == ["b"]
    assert tower.calls == [2]
    assert not tower.encoder.working


class FullTower(Tower):
    """An encoder on a device whose memory holds one image, and none that is named "huge".

    beside: the memory that other work of the step takes, in images.
    """

    def __init__(self, stream: EncoderStream) -> None:
        super().__init__(stream)
        self.held = 0
        self.beside = 0
        self.freed: list[int] = []

    def encode(self, image: ProcessedImage, ahead: UpcomingImages) -> Slices[VisualFeatures]:
        self.held += 1
        try:
            slices = super().encode(image, ahead)
            while True:
                if self.held + self.beside > 1 or image.identity == "huge":
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                try:
                    next(slices)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
                yield
        finally:
            self.held -= 1

    def free(self) -> None:
        self.freed.append(self.held)
        self.beside = 0


def test_an_image_that_does_not_fit_beside_others_is_encoded_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its request ended, although the image fits as soon as another one is encoded."""
    tower = FullTower(InlineStream())
    tower.beside = 1
    with caplog.at_level(logging.CRITICAL, "fovea.engine"):
        third = tower.encoder.step([job("c", "s2"), job("d")], 60.0, alone=False)
    assert not third.failures
    assert not third.images
    assert not tower.begun, "no other image begins before it"
    alone = tower.encoder.encode_alone(tower.free)
    assert list(alone.images) == ["c"]
    assert alone.images["c"].holders == {"s2"}
    assert tower.freed == [0]
    assert tower.encoder.memory_retries == 1
    assert list(tower.encoder.step([job("d")], 60.0, alone=False).images) == ["d"]


def test_an_image_is_not_alone_while_another_is_partly_encoded(caplog: pytest.LogCaptureFixture) -> None:
    tower = FullTower(InlineStream())
    tower.encoder.step([job("a")], 0.0, alone=False)
    with caplog.at_level(logging.CRITICAL, "fovea.engine"):
        # Both are wanted now, and the other one comes first, because its request is more urgent.
        tower.encoder._slice(job("b", "s2"), result := EncodeResult())
    assert not result.failures
    tower.encoder._jobs = [job("b", "s2"), job("a")]
    assert not tower.encoder.encode_alone(tower.free).images
    assert not tower.freed
    assert list(tower.encoder.step([job("b", "s2"), job("a")], 60.0, alone=False).images) == ["a"]
    assert list(tower.encoder.encode_alone(tower.free).images) == ["b"]


def test_an_image_that_does_not_fit_alone_fails_with_an_error_about_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tower = FullTower(InlineStream())
    with caplog.at_level(logging.CRITICAL, "fovea.engine"):
        assert not tower.encoder.step([job("huge"), job("a")], 60.0, alone=False).failures
        error = tower.encoder.encode_alone(tower.free).failures["huge"]
    assert isinstance(error, OutOfMemory)
    assert "GiB" not in str(error), "the text of CUDA's error tells about other processes"
    assert error.__traceback__ is None
    assert list(tower.encoder.step([job("a")], 60.0, alone=False).images) == ["a"]


def test_an_image_whose_sequences_left_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    tower = FullTower(InlineStream())
    with caplog.at_level(logging.CRITICAL, "fovea.engine"):
        tower.encoder.step([job("huge")], 60.0, alone=False)
    tower.encoder.drop()
    assert not tower.encoder.encode_alone(tower.free).failures
    assert list(tower.encoder.step([job("a")], 60.0, alone=False).images) == ["a"]
