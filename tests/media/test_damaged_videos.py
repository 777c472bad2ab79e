"""Damaged videos are refused, and whole ones never are, however they are encoded, cut and read."""

from __future__ import annotations

import io
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from fovea.core.errors import InvalidVideo
from fovea.media import video_container
from fovea.media.limits import MediaLimits
from fovea.media.sandbox.decoder import SandboxedDecoder
from fovea.media.video import open_video
from tests.support.clips import clip

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from damaged_videos import clip as encoded
from damaged_videos import copied, damaged, is_refused, outcome, pictures, read

LIMITS = MediaLimits()
QUIET = "log-level=none"


@pytest.mark.parametrize(
    ("encoder", "container", "options", "most"),
    [
        ("libx264", "mp4", {"profile": "baseline"}, 0),
        ("libx264", "mp4", {}, 1),
        ("libx265", "mp4", {"x265-params": f"{QUIET}:hash=1"}, 0),
        ("mpeg4", "mp4", {}, 0),
        ("libvpx-vp9", "webm", {"deadline": "realtime", "cpu-used": "8"}, 1),
    ],
)
def test_damaged_frames_are_not_answered_from(
    encoder: str, container: str, options: dict[str, str], most: int
) -> None:
    """Half of damaged H.264 files, and nearly all of VP9, were once answered from wrong frames.

    `benchmarks/damaged_videos.py` counts more files of more codecs.
    """
    if encoder not in av.codecs_available:
        pytest.skip(f"this PyAV encodes no {encoder}")
    data = encoded(pictures(12, moving=False), encoder, container, options)
    whole = read(data)
    ends = Counter(outcome(damaged(data, container, seed), whole) for seed in range(20))
    assert ends["silent"] <= most
    assert ends["refused"] >= 15


WHOLE = [
    ("libx264", "x264-params", "open-gop=1:keyint=6:bframes=3:scenecut=0"),
    ("libx264", "x264-params", "open-gop=1:keyint=6:bframes=5:b-pyramid=normal:ref=5:scenecut=0"),
    ("libx264", "x264-params", "intra-refresh=1:keyint=5:bframes=0"),
    ("libx265", "x265-params", f"open-gop=1:keyint=6:bframes=4:{QUIET}"),
    ("libx265", "x265-params", f"radl=2:open-gop=0:keyint=6:bframes=4:{QUIET}"),
]


@pytest.mark.parametrize(("encoder", "name", "value"), WHOLE, ids=[row[2].split(":log")[0] for row in WHOLE])
def test_whole_files_are_read_wherever_reading_begins(encoder: str, name: str, value: str) -> None:
    """Decoders report missing frames after a seek, and in streams that were cut; that is not damage.

    With a rolling refresh of rows, frames after a seek were once answered by frames half a second later.
    """
    if encoder not in av.codecs_available:
        pytest.skip(f"this PyAV encodes no {encoder}")
    data = encoded(pictures(18, moving=True), encoder, "mp4", {name: value})
    for file in (data, copied(data, "mp4"), copied(data, "matroska")):
        assert not is_refused(file)


def test_a_file_that_begins_between_key_frames_is_read() -> None:
    """Recorders that join a running stream write such files; seeking to their first frame once failed."""
    source, out = io.BytesIO(clip(24, options=(("g", "8"), ("bf", "0")))), io.BytesIO()
    with av.open(source) as file, av.open(out, "w", format="mp4") as cut:
        stream = cut.add_stream_from_template(file.streams.video[0])
        for packet in list(file.demux(video=0))[3:-1]:
            packet.stream = stream
            cut.mux(packet)
    assert len(read(out.getvalue())) == 21


@pytest.mark.parametrize(("encoder", "message"), [("libx264", b"\x06"), ("libx265", b"\x4e\x01")])
def test_wrong_messages_beside_the_pictures_are_no_damage(encoder: str, message: bytes) -> None:
    """Some cameras write messages (SEI) whose sizes are wrong. No pixel depends on them."""
    if encoder not in av.codecs_available:
        pytest.skip(f"this PyAV encodes no {encoder}")
    options = {"x265-params": QUIET} if encoder == "libx265" else {}
    data, out = encoded(pictures(4, moving=True), encoder, "mp4", options), io.BytesIO()
    unit = message + bytes((4, 200, 1, 2, 3, 0x80))  # it states 200 bytes and has three
    with av.open(io.BytesIO(data)) as source, av.open(out, "w", format="mp4") as file:
        target = file.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                other = av.Packet(len(unit).to_bytes(4, "big") + unit + bytes(packet))
                other.pts, other.dts, other.time_base = packet.pts, packet.dts, packet.time_base
                other.is_keyframe, other.stream = packet.is_keyframe, target
                file.mux(other)
    assert np.array_equal(read(out.getvalue()), read(data))


def test_the_error_names_the_damaged_frame() -> None:
    frames = pictures(24, moving=True)
    data = bytearray(encoded(frames, "mpeg4", "mp4", {"g": "8", "bf": "0"}))
    with av.open(io.BytesIO(data)) as file:
        places = [(packet.pos, packet.size) for packet in file.demux(video=0) if packet.size]
    at, size = places[10]
    data[at + 40 : at + size] = np.random.default_rng(0).bytes(size - 40)
    video = open_video(bytes(data), LIMITS)
    assert len(list(video.source.read([*range(8), *range(16, 24)]))) == 16  # they do not need the damaged one
    with pytest.raises(InvalidVideo, match=r"at frame 10 of 24 \(0\.33 s, first frame: 0\): ") as caught:
        list(video.source.read([12]))
    assert caught.value.code == "video_damaged"
    decoder = SandboxedDecoder(MediaLimits(video_workers=1))
    try:
        with pytest.raises(InvalidVideo, match="damaged at frame 10") as caught:
            list(decoder.open_video(bytes(data)).source.read([12]))
        assert caught.value.code == "video_damaged"
    finally:
        decoder.close()


def blocks(data: bytes) -> list[int]:
    """Positions of the simple blocks of a WebM of `clip`, whose frames are short."""
    found, at = [], data.index(b"\x1fC\xb6u") + 12
    while (at := data.find(b"\xa3", at)) >= 0:
        if data[at + 2] == 0x81:  # a size of one byte, then track 1
            found.append(at)
            at += 2 + (data[at + 1] & 0x7F)
        else:
            at += 1
    return found


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"\xa2", "damaged at byte"),  # an element of block groups
        (0, b"\xac", "damaged at byte"),  # an element that does not exist
        (2, b"\x82", "damaged at byte"),  # a track that does not exist
        (1, b"\xff\x81", "damaged"),  # a size that the cluster does not have
        (5, b"\x06", "frames can be found"),  # several frames in one block, which do not fit into it
    ],
)
def test_a_webm_whose_frames_get_lost_is_refused(place: int, value: bytes, message: str) -> None:
    """FFmpeg skips a damaged block; the frames after it were then computed from wrong ones."""
    data = bytearray(clip(container="webm"))
    at = blocks(bytes(data))[5] + place
    data[at : at + len(value)] = value
    with pytest.raises(InvalidVideo, match=message):
        open_video(bytes(data), LIMITS)


def test_a_live_webm_states_no_sizes() -> None:
    """Browsers record such files. A part of one is refused."""
    out = io.BytesIO()
    frames = pictures(6, moving=True)
    with av.open(out, "w", format="webm", options={"live": "1"}) as file:
        stream: Any = file.add_stream("libvpx", rate=30)
        stream.width, stream.height, stream.pix_fmt = 192, 192, "yuv420p"
        for pixels in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    data = out.getvalue()
    assert struct.unpack(">Q", b"\0" + data[data.index(b"\x18S\x80g") + 5 :][:7])[0] == (1 << 56) - 1
    assert len(read(data)) == 6
    with pytest.raises(InvalidVideo, match="the webm is truncated"):
        open_video(data[:-20], LIMITS)


def test_the_elements_of_a_webm_that_are_looked_at_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 100 MiB can have fifty million empty elements."""
    seen = 0
    tree = video_container._tree

    def counted(data: bytes) -> Iterator[tuple[bytes, int, int]]:
        nonlocal seen
        for element in tree(data):
            seen += 1
            yield element

    monkeypatch.setattr(video_container, "_tree", counted)
    monkeypatch.setattr(video_container, "MAX_ELEMENTS", 1000)
    endless = b"\x01" + b"\xff" * 7
    hostile = b"\x1aE\xdf\xa3\x80\x18S\x80g" + endless + b"\x1fC\xb6u" + endless + b"\xec\x80" * 5000
    video_container.check_blocks(hostile, 0)
    assert seen == 1001


def test_frames_of_libvpx_equal_those_of_ffmpeg() -> None:
    """VP8 and VP9 are decoded by libvpx, because FFmpeg's own decoders notice no damage in them."""
    for codec, name in (("libvpx", "vp8"), ("libvpx-vp9", "vp9")):
        data = encoded(pictures(10, moving=True), codec, "webm", {"deadline": "realtime", "cpu-used": "8"})
        with av.open(io.BytesIO(data)) as file:
            assert file.streams.video[0].codec_context.name == name
            expected = [frame.to_ndarray(format="rgb24").ravel() for frame in file.decode(video=0)]
        assert np.array_equal(read(data), expected)
