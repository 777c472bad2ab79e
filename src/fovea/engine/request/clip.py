"""A planned video: groups of frames, each encoded by itself, and decoded once for all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fovea.core.errors import InvalidMedia, InvalidVideo
from fovea.core.media import Image, Video
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.processor.pixels import Bytes, picture, resize
from fovea.engine.vision.processor.pruning import KeptCells, moving_cells
from fovea.engine.vision.processor.video import QwenVideos, VideoPlan


class Clip:
    """The sampled frames of one video, resized. Thread-safe.

    The frames are decoded at first use and freed when no request claims them any more. A later use decodes
    them again. Pruning does not change the frames, so requests that prune differently share a clip.

    name: names these frames in caches.
    pruning_lock: lock under which `Clips` finds the cells that pruning keeps.
    video: the video.
    """

    def __init__(self, name: str, video: Video, plan: VideoPlan, videos: QwenVideos) -> None:
        self.name = name
        self.pruning_lock = threading.Lock()
        self.video = video
        self._indices = plan.indices
        self._size = plan.height, plan.width
        self._videos = videos
        self._frames: list[Bytes] | None = None
        self._claims = 0
        self._lock = threading.Lock()
        self._decoding_lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Size of the resized frames in memory."""
        return len(set(self._indices)) * self._size[0] * self._size[1] * 3

    def acquire(self) -> None:
        """Count one more claim on the frames."""
        with self._lock:
            self._claims += 1

    def release(self) -> None:
        """Count one claim less. After the last one the frames are freed."""
        with self._lock:
            self._claims -= 1
            if not self._claims:
                self._frames = None

    def frames(self) -> list[Bytes]:
        """Return the frames, (height, width, 3) bytes each, in the order of the plan's indices.

        Raises InvalidVideo, and Abandoned if the last claim was released meanwhile.
        """
        with self._decoding_lock:
            frames = self._frames
            if frames is None:
                frames = list(self._decode())
                with self._lock:
                    self._frames = frames
            return frames

    def most_moving_cells(self, count: int) -> KeptCells:
        """Return the `count` cells, of all groups together, that move most. Raises InvalidVideo."""
        return moving_cells(self.frames(), self._videos.rule.group_frames, self._videos.factor, count)

    def group(self, number: int, plan: VisualPlan) -> ProcessedImage:
        """Return the encoder's input of group `number`, with its visual plan. Raises InvalidVideo."""
        size = self._videos.rule.group_frames
        frames = self.frames()[number * size : (number + 1) * size]
        return self._videos.group(self.video.identity, frames, plan)

    def _decode(self) -> Iterator[Bytes]:
        claimed = self._claims > 0  # without any claim, the caller itself waits

        def abandoned() -> bool:
            return claimed and not self._claims

        video, (height, width) = self.video, self._size
        previous: tuple[int, Bytes] | None = None
        for index, rgb in zip(self._indices, video.source.read(self._indices, abandoned), strict=True):
            if previous is None or previous[0] != index:
                if len(rgb) != video.width * video.height * 3:
                    raise InvalidVideo(f"frame {index} holds {len(rgb)} bytes")
                image = Image("", video.width, video.height, rgb)
                resized = resize(picture(image), height, width, self._videos.resample)
                previous = index, np.ascontiguousarray(resized)
            yield previous[1]


@dataclass(frozen=True, slots=True)
class PlannedFrames:
    """A group of a video's frames and its visual plan.

    The encoder and the caches treat it like a planned image.

    clip: the frames.
    video: number of the video in the request, for errors.
    number: number of the group in the video.
    plan: visual plan of the group.
    key: name of the encoder output in the caches.
    """

    clip: Clip = field(repr=False)
    video: int
    number: int
    plan: VisualPlan
    key: str

    @property
    def pixel_key(self) -> str:
        """The name of the pixels that the encoder reads."""
        return self.key

    def process(self) -> ProcessedImage:
        """Return the pixels of the group. Raises InvalidVideo."""
        try:
            return self.clip.group(self.number, self.plan)
        except InvalidMedia as error:
            raise error.at(self.video) from error


@dataclass(frozen=True, slots=True)
class PlannedVideo:
    """A video of a request, its plan and its frames.

    index: number of the video in the request.
    plan: frames, groups, times and tokens.
    clip: the frames.
    salt: the request's cache salt.
    settled: whether the plan's groups have the tokens that pruning keeps. Otherwise only the number of tokens
        is right, and the groups are placeholders until the frames are decoded.
    """

    index: int
    plan: VideoPlan
    clip: Clip = field(repr=False)
    salt: str = field(repr=False)
    settled: bool = True

    @property
    def groups(self) -> tuple[PlannedFrames, ...]:
        """The groups that keep at least one token."""
        name = f"{self.salt}\x00{self.clip.video.identity}\x00"
        return tuple(
            PlannedFrames(self.clip, self.index, number, group, name + group.key)
            for number, group in enumerate(self.plan.groups)
            if group.tokens
        )

    @property
    def pixel_count(self) -> int:
        """Number of pixels of all groups; the frames of a group count once."""
        return len(self.plan.groups) * self.plan.height * self.plan.width

    @property
    def cost(self) -> str:
        """Frames, size and tokens, for messages."""
        return (
            f"video {self.index}: {len(set(self.plan.indices))} frames of "
            f"{self.plan.width}x{self.plan.height} pixels, {self.plan.kept_tokens} tokens"
        )
