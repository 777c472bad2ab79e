"""What a video is, between the media floor that reads its header and the engine that samples it.

A video travels undecoded: its size, its rhythm and a way to its frames. Which frames are shown is the model's rule and
the client's wish; only those are decoded, by whoever makes the pixels, after the request was admitted by its cost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fovea.core.image import Image

MAX_PRUNING = 0.95
FRAMES_PER_SECOND = 2.0
"""The rhythm of frames that come as pictures, without one of their own."""


class FrameSource(Protocol):
    """A way to a video's frames. Thread-safe: every reading stands for itself."""

    def read(self, indices: Sequence[int]) -> Iterator[bytes]:
        """RGB bytes (height * width * 3, row-major) of the frames `indices`, which ascend; a repeated one comes again.

        Raises InvalidVideo for what can not be decoded.
        """
        ...


@dataclass(frozen=True, slots=True)
class Video:
    """identity: 64 hex digits, a 256-bit hash of the source bytes with type and dimensions, or of the frames.
    width, height: pixels of a frame, upright. frames: how many there are. fps: frames per second, on average.
    chosen: the frames were picked by whoever sent them; all are shown unless a budget asks for others.
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
    """How much of a video the model sees. None: as the model's own video processor has it.

    fps: frames sampled per second of video. min_frames, max_frames: bounds on how many are sampled.
    max_pixels: pixels of one frame after resizing, at most.
    pruning_rate: share of visual tokens left out where little moves, 0 to 0.95; 0 keeps all.
    """

    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    pruning_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class _Pictures:
    """Frames that are decoded already."""

    images: tuple[Image, ...]

    def read(self, indices: Sequence[int]) -> Iterator[bytes]:
        return (self.images[index].rgb for index in indices)


def video_of_images(images: Sequence[Image], fps: float = FRAMES_PER_SECOND) -> Video:
    """A video of pictures of one size, in order. Raises ValueError for none, or for pictures of different sizes."""
    if not images:
        raise ValueError("no frames")
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
        digest.hexdigest(), first.width, first.height, len(images), fps, _Pictures(tuple(images)), True
    )
