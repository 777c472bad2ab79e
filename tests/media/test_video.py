"""Video files: headers, errors of files that are refused, and decoding of exactly the requested frames."""

from __future__ import annotations

import asyncio
import base64
import struct
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fovea.core.errors import Forbidden, InvalidRequest, InvalidVideo, RequestError, Unavailable
from fovea.core.media import Video, video_of_images
from fovea.media import video as module
from fovea.media.image.decode import from_pil
from fovea.media.limits import IMAGE, Kind, MediaLimits
from fovea.media.load import MediaLoader
from fovea.media.video import open_video, probe_video
from fovea.media.video_container import container_of, is_truncated
from tests.media.samples import sample
from tests.support.clips import clip, level, noise, nothing, sound

LIMITS = MediaLimits()
KINDS = {
    "mp4 h264": {"container": "mp4"},
    "mp4 h264 with B-frames": {"container": "mp4", "options": (("g", "8"), ("bf", "3"))},
    "mp4 hevc": {
        "container": "mp4",
        "codec": "libx265",
        "options": (("x265-params", "keyint=8:log-level=none"),),
    },
    "mp4 mpeg4": {"container": "mp4", "codec": "mpeg4"},
    "webm vp9": {"container": "webm"},
    "webm vp8": {"container": "webm", "codec": "libvpx"},
}


def brightness(rgb: bytes) -> float:
    return float(np.frombuffer(rgb, np.uint8).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_headers_and_frames_of_every_codec(kind: str) -> None:
    settings: dict[str, Any] = KINDS[kind]
    if settings.get("codec") == "libx265":
        av = pytest.importorskip("av")
        if "libx265" not in av.codec.codecs_available:
            pytest.skip("this PyAV encodes no H.265")
    data = clip(24, **settings)
    header = probe_video(data, LIMITS)
    assert (header.width, header.height, len(header.stamps)) == (64, 48, 24)
    assert header.fps == pytest.approx(12)
    assert header.container == settings["container"]
    video = open_video(data, LIMITS)
    assert (video.frames, video.fps) == (24, pytest.approx(12))
    for wanted in ([0, 5, 10, 23], [23], [7, 7, 8, 9], list(range(24))):
        levels = [brightness(rgb) for rgb in video.source.read(wanted)]
        assert levels == pytest.approx([level(index) for index in wanted], abs=4), wanted


def test_only_requested_frames_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader seeks to a distant frame, and only requested frames become RGB."""
    video = open_video(clip(96, rate=24), LIMITS)
    converted: list[int] = []
    upright = module.EncodedFrames._upright_rgb
    monkeypatch.setattr(
        module.EncodedFrames,
        "_upright_rgb",
        lambda self, frame: converted.append(frame.pts) or upright(self, frame),
    )
    assert len(list(video.source.read([0, 90]))) == 2
    assert len(converted) == 2


def test_frames_are_turned_upright() -> None:
    """Phones store frames sideways, with a display matrix. Here it turns them by 90 degrees clockwise."""
    data = bytearray(clip(4, striped=True))
    at = data.index(b"tkhd") + 44  # ISO 14496-12, 8.3.2: the matrix of a track's header, version 0
    data[at : at + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 48 << 16, 0, 1 << 30)
    video = open_video(bytes(data), LIMITS)
    assert (video.width, video.height) == (48, 64)
    (rgb,) = video.source.read([0])
    pixels = np.frombuffer(rgb, np.uint8).reshape(64, 48, 3)
    assert pixels[:, -3:].mean() > 200
    assert pixels[:, :-12].mean() < 60


TABLE: list[tuple[str, bytes, MediaLimits, str, str]] = [
    ("empty", b"", LIMITS, "the data is empty", "unsupported_video_type"),
    (
        "text", b"hello there, not a video", LIMITS, "but plain text; accepted: MP4 and WebM",
        "unsupported_video_type",
    ),
    ("image", sample(), LIMITS, "not a video of an accepted type", "unsupported_video_type"),
    ("cut mp4", clip()[:900], LIMITS, "the mp4 is truncated: it states a size", "video_truncated"),
    ("cut by a byte", clip()[:-1], LIMITS, "the mp4 is truncated", "video_truncated"),
    ("cut webm", clip(container="webm")[:-9], LIMITS, "the webm is truncated", "video_truncated"),
    ("rubbish in an mp4", clip()[:48] + bytes(200), LIMITS, "the mp4", ""),
    ("rubbish in a webm", b"\x1aE\xdf\xa3" + bytes(range(200)), LIMITS, "the webm", ""),
    ("sound mp4", sound(), LIMITS, "the mp4 holds sound only", "video_empty"),
    ("no frames mp4", nothing(), LIMITS, "the mp4 holds no video stream", "video_empty"),
    ("no frames webm", nothing("webm"), LIMITS, "the webm cannot be decoded: end of file", "invalid_video"),
    ("sound webm", sound("webm"), LIMITS, "the webm holds sound only", "video_empty"),
    (
        "too long", clip(), replace(LIMITS, max_video_s=1.5),
        "is 2.0 s long; accepted: at most 1.5 s", "video_too_long",
    ),
    (
        "frames", clip(), replace(LIMITS, max_video_frames=10),
        "24 frames or more; accepted: at most 10", "video_too_long",
    ),
    (
        "frames webm", clip(container="webm"), replace(LIMITS, max_video_frames=10),
        "11 frames or more", "video_too_long",
    ),
    (
        "pixels", clip(), replace(LIMITS, max_video_frame_pixels=3000),
        "frames are 64x48 pixels, 3072 in all; accepted: at most 3000", "video_too_large",
    ),
    (
        "shape", clip(), replace(LIMITS, max_aspect_ratio=1.1),
        "an aspect ratio of at most 1.1:1", "video_too_large",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "limits", "message", "code"), TABLE, ids=[row[0] for row in TABLE])
def test_bad_input(name: str, data: bytes, limits: MediaLimits, message: str, code: str) -> None:
    with pytest.raises(InvalidVideo) as caught:
        open_video(data, limits)
    assert message in caught.value.message
    assert caught.value.status == 400
    if code:
        assert caught.value.code == code


def test_the_size_is_checked_before_packets_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(LIMITS, max_video_frame_pixels=3000)
    monkeypatch.setattr(module, "_frame_packets", lambda *_: pytest.fail("packets were read"))
    with pytest.raises(InvalidVideo, match="64x48"):
        open_video(clip(), limits)


def test_damaged_frames_raise_only_invalid_video() -> None:
    data = bytearray(clip(container="webm"))
    data[len(data) // 2 : len(data) // 2 + 200] = bytes(200)
    with suppress(InvalidVideo):  # no other error may occur
        video = open_video(bytes(data), LIMITS)
        list(video.source.read(range(video.frames)))


@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_every_prefix_of_a_file_is_refused(container: str) -> None:
    data = clip(6, container=container)
    for end in range(12, len(data), 7):
        assert container_of(data[:end]) == container
        with pytest.raises(InvalidVideo):
            open_video(data[:end], LIMITS)
    assert not is_truncated(data, "mp4" if container == "mp4" else "webm")


def test_the_error_without_pyav_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(Unavailable, match=r"pip install 'fovea-vlm\[video\]'"):
        open_video(clip(), LIMITS)


def test_the_identity_of_a_video_depends_on_its_content() -> None:
    assert open_video(clip(), LIMITS).identity == open_video(bytes(clip()), LIMITS).identity
    assert open_video(clip(), LIMITS).identity != open_video(clip(23), LIMITS).identity
    frames = [from_pil(frame) for frame in noise(3, 8, 8)]
    assert video_of_images(frames).identity == video_of_images(list(frames)).identity
    others = [video_of_images(frames[::-1]), video_of_images(frames[:2]), video_of_images(frames, fps=1.0)]
    assert len({video.identity for video in (*others, video_of_images(frames))}) == 4
    with pytest.raises(ValueError, match="no frames"):
        video_of_images([])
    with pytest.raises(ValueError, match="8x8 and 8x9"):
        video_of_images([*frames, from_pil(noise(1, 8, 9)[0])])


def data_url(data: bytes, declared: str = "video/mp4") -> str:
    return f"data:{declared};base64,{base64.b64encode(data).decode()}"


class Shelf:
    async def fetch(self, url: str, kind: Kind = IMAGE, scope: str = "") -> bytes:
        assert kind.noun == "video"
        return clip()

    def forget(self, url: str, kind: Kind = IMAGE, scope: str = "") -> None: ...

    async def aclose(self) -> None: ...


async def open_videos_of(urls: list[str], limits: MediaLimits = LIMITS) -> tuple[Video, ...]:
    loader = MediaLoader(limits, Shelf())
    try:
        return (await loader.open_videos(urls, [f"p{i}" for i in range(len(urls))]))[0]
    finally:
        await loader.aclose()


async def test_data_file_and_https_urls(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(clip())
    urls = [data_url(clip()), f"file://{tmp_path}/clip.mp4", "https://a.example/clip.mp4"]
    videos = await open_videos_of(urls, replace(LIMITS, file_root=tmp_path))
    assert len({video.identity for video in videos}) == 1


@pytest.mark.parametrize(
    ("url", "limits", "kind", "message"),
    [
        (data_url(b"x" * 99), LIMITS, InvalidVideo, "video 0: the data is not a video"),
        (data_url(clip(), "image/png"), LIMITS, InvalidVideo, "declares 'image/png'; accepted: video/*"),
        (data_url(clip()), replace(LIMITS, max_video_bytes=500), InvalidVideo, "accepted: at most 500"),
        ("file:///etc/passwd", LIMITS, Forbidden, "video 0: file:// URLs are not accepted here"),
        (
            "https://a.example/x",
            replace(LIMITS, allow_remote=False),
            Forbidden,
            "remote videos are turned off",
        ),
        ("clip.mp4", LIMITS, InvalidVideo, "accepted: data:video/...;base64,..."),
        ("", LIMITS, InvalidVideo, "the video URL is empty"),
    ],
)
async def test_video_urls_are_checked_like_image_urls(
    url: str, limits: MediaLimits, kind: type[RequestError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        await open_videos_of([url], limits)
    assert message in caught.value.message
    assert caught.value.param == "p0"


async def test_too_many_videos() -> None:
    with pytest.raises(InvalidRequest, match="the request has 2 videos; accepted: at most 1"):
        await open_videos_of([data_url(clip())] * 2, replace(LIMITS, max_videos=1))


def test_threads_can_read_frames_at_the_same_time() -> None:
    video = open_video(clip(), LIMITS)

    async def many() -> list[list[bytes]]:
        work = [asyncio.to_thread(lambda: list(video.source.read([1, 20]))) for _ in range(6)]
        return await asyncio.gather(*work)

    first, *rest = asyncio.run(many())
    assert all(other == first for other in rest)
