"""Count how damaged and whole videos are answered: python benchmarks/damaged_videos.py

Makes clips of moving and of still pictures with many codecs, damages each in --count ways (noise over 4 to
300 bytes of its frames), and reads all frames. A damaged clip is refused, or its frames are those of the
whole clip ("right"), or some are wrong ("silent"). Then it reads whole clips in many encodings, all frames in
one pass and single ones alone, and counts those that are refused or differ. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import io
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fovea.core.errors import InvalidVideo
from fovea.media.limits import MediaLimits
from fovea.media.video import open_video

Frames = list[NDArray[np.int16]]
LIMITS = MediaLimits()
SIDE = 192
WRONG = 3.0
"""Mean difference of a frame's pixels, of 255, from which it is wrong."""

# (name, encoder, container, options)
DAMAGED = (
    ("H.264", "libx264", "mp4", {}),
    ("H.264 without CABAC", "libx264", "mp4", {"profile": "baseline"}),
    ("H.265", "libx265", "mp4", {"x265-params": "log-level=none"}),
    ("H.265 with checksums", "libx265", "mp4", {"x265-params": "log-level=none:hash=1"}),
    ("MPEG-4", "mpeg4", "mp4", {}),
    ("VP8", "libvpx", "webm", {}),
    ("VP9", "libvpx-vp9", "webm", {"deadline": "realtime", "cpu-used": "8"}),
    ("AV1", "libsvtav1", "webm", {"preset": "10"}),
)
WHOLE = {
    "libx264": (
        "open-gop=1:keyint=12:bframes=3",
        "open-gop=1:keyint=12:bframes=5:b-pyramid=normal:ref=5",
        "intra-refresh=1:keyint=10:bframes=0", "keyint=10:bframes=3", "keyint=20:bframes=8:b-adapt=2",
        "tff=1:keyint=12",
        "slices=5:keyint=9", "keyint=1", "cabac=0:bframes=3", "weightp=2:weightb=1:bframes=3", "qp=0",
    ),
    "libx265": (
        "open-gop=1:keyint=12:bframes=4", "open-gop=0:keyint=12", "radl=2:open-gop=0:keyint=12:bframes=4",
        "bframes=8:keyint=30:ref=5", "keyint=1", "hash=1", "hash=2", "slices=3:wpp=1",
    ),
    "mpeg4": ("bf=2:g=12", "flags=+qpel+mv4", "g=1", "data_partitioning=1", "ps=200"),
    "libvpx": ("auto-alt-ref=1:lag-in-frames=16", "deadline=realtime:cpu-used=8", "slices=4", "g=10"),
    "libvpx-vp9": (
        "auto-alt-ref=1:lag-in-frames=16", "deadline=realtime:cpu-used=8", "error-resilient=1", "lossless=1",
        "tile-columns=2", "frame-parallel=1", "g=10",
    ),
    "libsvtav1": ("preset=10", "preset=8:g=10"),
}  # fmt: skip


def pictures(count: int, moving: bool) -> list[NDArray[np.uint8]]:
    """Return frames of soft noise: a window that moves over it, or one that changes twice."""
    small = np.random.default_rng(1).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    wide = np.asarray(Image.fromarray(small).resize((SIDE + 128, SIDE + 128), Image.Resampling.BICUBIC))
    steps = range(count) if moving else [60 * (3 * index // count) for index in range(count)]
    return [np.ascontiguousarray(wide[step : step + SIDE, 2 * step % 64 :][:, :SIDE]) for step in steps]


def clip(frames: list[NDArray[np.uint8]], encoder: str, container: str, options: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream: Any = file.add_stream(encoder, rate=30, options=options)
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for pixels in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return out.getvalue()


def copied(data: bytes, container: str) -> bytes:
    """Return an MP4 from its second key frame on, copied without being encoded again."""
    out = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(out, "w", format=container) as file:
        track = source.streams.video[0]
        keys = [packet.pts for packet in source.demux(track) if packet.is_keyframe and packet.size]
        source.seek(keys[min(1, len(keys) - 1)], stream=track)
        target = file.add_stream_from_template(track)
        for packet in source.demux(track):
            if packet.size:
                packet.stream = target
                file.mux(packet)
    return out.getvalue()


def damaged(data: bytes, container: str, seed: int) -> bytes:
    """Return the file with noise over some bytes of its frames."""
    chance = random.Random(seed)
    start = data.index(b"mdat") + 8 if container == "mp4" else data.index(b"\x1fC\xb6u") + 12
    end = data.rindex(b"moov") if container == "mp4" else len(data) - 150
    at, length = chance.randrange(start, end - 300), chance.choice((4, 30, 120, 300))
    return data[:at] + chance.randbytes(length) + data[at + length :]


def read(data: bytes, indices: list[int] | None = None) -> Frames:
    video = open_video(data, LIMITS)
    wanted = list(range(video.frames)) if indices is None else indices
    return [np.frombuffer(rgb, np.uint8).astype(np.int16) for rgb in video.source.read(wanted)]


def outcome(data: bytes, whole: Frames) -> str:
    try:
        frames = read(data)
    except InvalidVideo:
        return "refused"
    if len(frames) != len(whole):
        return "silent"
    worst = max(np.abs(frame - right).mean() for frame, right in zip(frames, whole, strict=True))
    return "silent" if worst > WRONG else "right"


def whole_clips() -> Iterator[tuple[str, bytes]]:
    """Yield whole files: encodings of every kind, and copies of them that begin at a later key frame."""
    frames = pictures(60, moving=True)
    for encoder, variants in WHOLE.items():
        container = "webm" if encoder.startswith("libvpx") else "mp4"
        private = {"libx264": "x264-params", "libx265": "x265-params"}.get(encoder)
        for variant in variants:
            if private:
                options = {private: variant + ":log-level=none" * (encoder == "libx265")}
            else:
                options = dict(pair.split("=", 1) for pair in variant.split(":"))
            data = clip(frames, encoder, container, options)
            yield f"{encoder} {variant}", data
            if private:
                for target in ("mp4", "matroska"):
                    yield f"{encoder} {variant}, cut into {target}", copied(data, target)


def is_refused(data: bytes) -> bool:
    """Whether a whole file is refused, or a frame that is read alone differs from that of reading all."""
    try:
        frames = read(data)
        return any((read(data, [index])[0] != frames[index]).any() for index in range(0, len(frames), 3))
    except InvalidVideo:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="ways to damage each clip (default: 60)")
    count = parser.parse_args().count
    print(f"| codec | pictures | refused | right | silent (of {count}) |\n|---|---|---|---|---|")
    for name, encoder, container, options in DAMAGED:
        for moving in (False, True):
            data = clip(pictures(30, moving), encoder, container, options)
            whole = read(data)
            ends = Counter(outcome(damaged(data, container, seed), whole) for seed in range(count))
            kind = "moving" if moving else "still"
            print(f"| {name} | {kind} | {ends['refused']} | {ends['right']} | {ends['silent']} |", flush=True)
    clips = list(whole_clips())
    refused = [name for name, data in clips if is_refused(data)]
    print(f"\nWhole files: {len(clips)}; refused: {len(refused)} {refused or ''}".rstrip())


if __name__ == "__main__":
    main()
