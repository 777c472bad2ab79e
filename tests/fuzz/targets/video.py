"""Video files: container, header, and the first frames."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np

from fovea.media.limits import MediaLimits
from fovea.media.video import open_video
from fovea.media.video_container import container_of, is_truncated
from tests.fuzz.refusals import note, refusals

LONGEST = 16384
WORDS = (
    b"ftyp", b"isom", b"moov", b"mdat", b"trak", b"mdia", b"stbl", b"stsd", b"stts", b"stsz", b"stco",
    b"co64", b"avc1", b"free", b"edts", b"elst", b"\x1aE\xdf\xa3", b"\x18S\x80g", b"\x15I\xa9f",
    b"\x16T\xaek", b"\x1fC\xb6u", b"\xa3", b"\x42\x82", b"webm", b"matroska", b"V_VP8", b"V_VP9",
    b"V_MPEG4/ISO/AVC", b"\0\0\0\1", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x01\xff\xff",
)  # fmt: skip
LIMITS = MediaLimits(max_video_frame_pixels=40_000, max_video_frames=60, max_video_s=30)


def target(data: bytes) -> None:
    container = container_of(data)
    if container is not None:
        note(f"{container} {is_truncated(data, container)}")
    with refusals():
        video = open_video(data, LIMITS)
        note("opened")
        last = min(video.frames, 3)
        for rgb in video.source.read(range(last)):
            assert len(rgb) == 3 * video.width * video.height
        note("decoded")


def seeds() -> list[bytes]:
    files = [
        _clip("mp4", "libx264"), _clip("webm", "libvpx"), _clip("webm", "libvpx-vp9"), _clip("mp4", "mpeg4"),
    ]  # fmt: skip
    return [
        *files, *(data[: len(data) // 2] for data in files), b"", b"\x1aE\xdf\xa3", b"\0\0\0\x18ftypavif",
        b"\0\0\0\1mdat", b"\0\0\0\0moov", b"\x1aE\xdf\xa3\x01\xff\xff\xff\xff\xff\xff\xff",
    ]  # fmt: skip


def _clip(container: str, codec: str) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=Fraction(10))
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for level in range(4):
            pixels = np.full((32, 48, 3), 60 * level, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()
