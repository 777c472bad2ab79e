"""A planned video: its groups of frames as things to encode, and its frames, decoded once for all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fovea.core.errors import InvalidMedia, InvalidVideo
from fovea.core.image import Image
from fovea.core.video import Video
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.processor.pixels import Bytes, resized_bytes
from fovea.engine.vision.processor.pruning import Kept, moving_cells
from fovea.engine.vision.processor.video import QwenVideos, VideoPlan


class Clip:
    """The sampled frames of one video, resized. They are decoded when the first is asked for, and forgotten when nobody
    claims them any more; whoever needs them again decodes again. Thread-safe.

    Frames are the same whatever pruning leaves of them, so requests that prune differently share a clip.
    """

    def __init__(self, name: str, video: Video, plan: VideoPlan, videos: QwenVideos) -> None:
        """name: of these frames, for whoever remembers something about them."""
        self.name = name
        self.looking = threading.Lock()
        self.video = video
        self._indices = plan.indices
        self._size = plan.height, plan.width
        self._videos = videos
        self._frames: list[Bytes] | None = None
        self._users = 0
        self._lock = threading.Lock()
        self._decoding = threading.Lock()

    @property
    def nbytes(self) -> int:
        """What its frames take."""
        return len(set(self._indices)) * self._size[0] * self._size[1] * 3

    def use(self) -> None:
        """One more claim on the frames."""
        with self._lock:
            self._users += 1

    def forget(self) -> None:
        """One claim less; after the last one they are gone."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._frames = None

    def frames(self) -> list[Bytes]:
        """(height, width, 3) bytes each, in the order of the plan's indices. Raises InvalidVideo."""
        with self._decoding:
            frames = self._frames
            if frames is None:
                frames = list(self._decoded())
                with self._lock:
                    self._frames = frames
            return frames

    def moving(self, count: int) -> Kept:
        """The `count` cells of all groups that move most."""
        return moving_cells(self.frames(), self._videos.rule.together, self._videos.factor, count)

    def group(self, number: int, plan: VisualPlan) -> ProcessedImage:
        size = self._videos.rule.together
        frames = self.frames()[number * size : (number + 1) * size]
        return self._videos.group(self.video.identity, frames, plan)

    def _decoded(self) -> Iterator[Bytes]:
        video, (height, width) = self.video, self._size
        before: tuple[int, Bytes] | None = None
        for index, rgb in zip(self._indices, video.source.read(self._indices), strict=True):
            if before is None or before[0] != index:
                if len(rgb) != video.width * video.height * 3:
                    raise InvalidVideo(f"frame {index} holds {len(rgb)} bytes")
                image = Image("", video.width, video.height, rgb)
                resized = resized_bytes(image, height, width, self._videos.resample)
                before = index, np.ascontiguousarray(resized)
            yield before[1]


@dataclass(frozen=True, slots=True)
class PlannedFrames:
    """A group of a video's frames, as the encoder and the caches see it: like a planned image.

    video: its number in the request, for errors.
    """

    clip: Clip = field(repr=False)
    video: int
    number: int
    plan: VisualPlan
    key: str

    @property
    def pixels(self) -> str:
        """As `PlannedImage` has it."""
        return self.key

    def process(self) -> ProcessedImage:
        """Raises InvalidVideo."""
        try:
            return self.clip.group(self.number, self.plan)
        except InvalidMedia as error:
            raise error.at(self.video) from error


@dataclass(frozen=True, slots=True)
class PlannedVideo:
    """groups: those that keep any token. times and `joined` as in VideoPlan.

    settled: the groups' tokens are those that pruning leaves; else they stand for as many that nobody knows yet.
    """

    index: int
    plan: VideoPlan
    clip: Clip = field(repr=False)
    salt: str = field(repr=False)
    settled: bool = True

    @property
    def groups(self) -> tuple[PlannedFrames, ...]:
        name = f"{self.salt}\x00{self.clip.video.identity}\x00"
        return tuple(
            PlannedFrames(self.clip, self.index, number, group, name + group.key)
            for number, group in enumerate(self.plan.groups)
            if group.tokens
        )

    @property
    def pixels(self) -> int:
        """Of all its groups, a group's frames counted once."""
        return len(self.plan.groups) * self.plan.height * self.plan.width

    @property
    def cost(self) -> str:
        """For messages: what makes it expensive."""
        return (
            f"video {self.index}: {len(set(self.plan.indices))} frames of {self.plan.width}x{self.plan.height} pixels, "
            f"{self.plan.kept} tokens"
        )
