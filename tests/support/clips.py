"""Test videos: real files written with PyAV, and frames as arrays."""

from __future__ import annotations

import io
from fractions import Fraction
from functools import cache
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

Frame = NDArray[np.uint8]


def noise(count: int, width: int, height: int, seed: int = 0) -> list[Image.Image]:
    """Frames of random pixels that have nothing in common."""
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)) for _ in range(count)]


def numbered(count: int, width: int = 64, height: int = 48) -> list[Frame]:
    """Grey frames, frame k of brightness `level(k)`, so that a test can tell which frame was decoded."""
    return [np.full((height, width, 3), level(k), np.uint8) for k in range(count)]


def level(index: int) -> int:
    return 20 + 7 * (index % 32)


@cache
def clip(
    count: int = 24,
    *,
    container: str = "mp4",
    codec: str = "",
    rate: int = 12,
    width: int = 64,
    height: int = 48,
    options: tuple[tuple[str, str], ...] = (("g", "8"),),
    striped: bool = False,
) -> bytes:
    """A video file of `numbered` frames, with a key frame every 8 frames.

    striped: draw a white stripe of 8 pixels at the top.
    """
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream: Any = file.add_stream(
            codec or {"mp4": "libx264", "webm": "libvpx-vp9"}[container],
            rate=Fraction(rate),
            options=dict(options),
        )
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in numbered(count, width, height):
            if striped:
                frame[:8] = 255
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


@cache
def sound(container: str = "mp4") -> bytes:
    """A file with a sound track and no video track."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream: Any = file.add_stream({"mp4": "aac", "webm": "libopus"}[container], rate=48000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 48000
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


@cache
def nothing(container: str = "mp4") -> bytes:
    """A file with a video track and no frames."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream: Any = file.add_stream({"mp4": "libx264", "webm": "libvpx-vp9"}[container], rate=12)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        file.start_encoding()
    return buffer.getvalue()
