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
    """The sampled frames of one video, resized. They are decoded when the first is asked for, and forgotten when the
    encoder has read them; whoever needs them again decodes again. Thread-safe.
    """

    def __init__(self, index: int, video: Video, plan: VideoPlan, videos: QwenVideos) -> None:
        """index: of the video in its request, for errors."""
        self.video = video
        self._index = index
        self._plan = plan
        self._videos = videos
        self._frames: list[Bytes] | None = None
        self._lock = threading.Lock()

    def frames(self) -> list[Bytes]:
        """(height, width, 3) bytes each, in the order of the plan's indices. Raises InvalidVideo."""
        with self._lock:
            if self._frames is None:
                try:
                    self._frames = list(self._decoded())
                except InvalidMedia as error:
                    raise error.at(self._index) from error
            return self._frames

    def forget(self) -> None:
        with self._lock:
            self._frames = None

    def moving(self) -> Kept:
        """Which cells of every group a pruned video keeps."""
        videos = self._videos
        return moving_cells(self.frames(), videos.rule.together, videos.factor, self._plan.kept)

    def group(self, number: int, plan: VisualPlan) -> ProcessedImage:
        size = self._videos.rule.together
        frames = self.frames()[number * size : (number + 1) * size]
        return self._videos.group(self.video.identity, frames, plan)

    def _decoded(self) -> Iterator[Bytes]:
        video, plan = self.video, self._plan
        before: tuple[int, Bytes] | None = None
        for index, rgb in zip(plan.indices, video.source.read(plan.indices), strict=True):
            if before is None or before[0] != index:
                if len(rgb) != video.width * video.height * 3:
                    raise InvalidVideo(f"frame {index} holds {len(rgb)} bytes")
                image = Image("", video.width, video.height, rgb)
                resized = resized_bytes(image, plan.height, plan.width, self._videos.resample)
                before = index, np.ascontiguousarray(resized)
            yield before[1]


@dataclass(frozen=True, slots=True)
class PlannedFrames:
    """A group of a video's frames, as the encoder and the caches see it: like a planned image."""

    clip: Clip = field(repr=False)
    number: int
    plan: VisualPlan
    key: str

    def process(self) -> ProcessedImage:
        return self.clip.group(self.number, self.plan)

    def forget(self) -> None:
        self.clip.forget()


@dataclass(frozen=True, slots=True)
class PlannedVideo:
    """groups: those that keep any token. times and `joined` as in VideoPlan."""

    index: int
    plan: VideoPlan
    clip: Clip = field(repr=False)
    salt: str = field(repr=False)

    @property
    def groups(self) -> tuple[PlannedFrames, ...]:
        name = f"{self.salt}\x00{self.clip.video.identity}\x00"
        return tuple(
            PlannedFrames(self.clip, number, group, name + group.key)
            for number, group in enumerate(self.plan.groups)
            if group.tokens
        )

    @property
    def cost(self) -> str:
        """For messages: what makes it expensive."""
        return (
            f"video {self.index}: {len(set(self.plan.indices))} frames of {self.plan.width}x{self.plan.height} pixels, "
            f"{self.plan.kept} tokens"
        )
