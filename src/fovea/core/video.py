"""Videos as the media floor hands them to the engine, and the client's settings for each of them.

A video is passed on undecoded: its size, its frame rate and a source of its frames. The model's sampling rule
and the client's settings choose the frames. Only those are decoded, after the request was admitted by its
cost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fovea.core.image import Image, Rgb

MAX_PRUNING = 0.95
FRAMES_PER_SECOND = 2.0
"""The frame rate of a video that is sent as pictures without a rate."""


def _never() -> bool:
    return False


class Abandoned(Exception):
    """The frames of a video or the pages of a PDF are not wanted any more; decoding has stopped."""


class FrameSource(Protocol):
    """Reads the frames of a video. Thread-safe: calls of `read` are independent of each other."""

    def check(self, indices: Sequence[int]) -> None:
        """Check, before anything is decoded, that reading these frames is not too much work.

        Raises InvalidVideo with the amount of work and the limit.
        """
        ...

    def read(self, indices: Sequence[int], abandoned: Callable[[], bool] = _never) -> Iterator[Rgb]:
        """Yield the RGB bytes (height * width * 3, row-major) of each frame in `indices`.

        indices: ascending; a repeated index yields its frame again.
        abandoned: asked again and again while frames are decoded; True stops it.
        Raises InvalidVideo if a frame cannot be decoded, Abandoned if nobody wants the frames any more.
        """
        ...


@dataclass(frozen=True, slots=True)
class Video:
    """An undecoded video: header and a source of frames.

    identity: 64 hex digits, a 256-bit hash of the source bytes with type and dimensions, or of the frames.
    width, height: pixels of an upright frame.
    frames: number of frames.
    fps: frames per second, on average.
    source: reads the frames.
    preselected: whether the client selected the frames. The model then gets all of them, up to its own limit,
        unless the budget sets a number or rate of frames.
    """

    identity: str
    width: int
    height: int
    frames: int
    fps: float
    source: FrameSource = field(repr=False, compare=False)
    preselected: bool = False

    @property
    def duration_s(self) -> float:
        return self.frames / self.fps


@dataclass(frozen=True, slots=True)
class VideoBudget:
    """The client's limits on the frames and visual tokens of a video.

    Where a field is None, the model's own video processor decides.

    fps: frames sampled per second of video.
    min_frames, max_frames: bounds on the number of sampled frames.
    max_pixels: most pixels of one frame after resizing.
    pruning_rate: share of the visual tokens that are left out where little moves, 0 to 0.95; 0 keeps all.
    """

    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    pruning_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class _DecodedFrames:
    """A source of frames that are decoded already."""

    images: tuple[Image, ...]

    def check(self, indices: Sequence[int]) -> None:
        """Nothing: the frames are there."""

    def read(self, indices: Sequence[int], abandoned: Callable[[], bool] = _never) -> Iterator[Rgb]:
        return (self.images[index].rgb for index in indices)


def video_of_images(images: Sequence[Image], fps: float = FRAMES_PER_SECOND) -> Video:
    """Make a video of pictures, in order. Raises ValueError for none, or for pictures of different sizes."""
    if not images:
        raise ValueError("the video has no frames; at least one is needed")
    first = images[0]
    for image in images:
        if (image.width, image.height) != (first.width, first.height):
            raise ValueError(
                f"frames of {first.width}x{first.height} and {image.width}x{image.height} pixels"
            )
    digest = hashlib.sha256(f"frames;{fps!r};".encode())
    for image in images:
        digest.update(f"{image.identity};".encode())
    return Video(
        digest.hexdigest(), first.width, first.height, len(images), fps, _DecodedFrames(tuple(images)), True
    )
