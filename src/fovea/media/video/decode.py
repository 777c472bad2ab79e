"""A video's header, and frames of it on demand; the only file that lets PyAV near a stranger's bytes.

Order matters, as with images: signature and container first, so that exactly one demuxer is opened and no playlist or
network protocol; then the header against every limit; then the packets are counted, which decodes nothing; then one
frame is decoded, to know that the codec works and which side is up. Later, frames are decoded as they are asked for:
the reader jumps to the last key frame before a wanted one, converts the wanted ones only, and holds one at a time.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fovea.core.errors import FoveaError, InvalidVideo, Unavailable
from fovea.core.image import content_identity
from fovea.core.video import Video
from fovea.media.image.sniff import describe
from fovea.media.limits import MediaLimits
from fovea.media.video.container import MEDIA_TYPES, Container, container_of, cut_off

CODECS = ("h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "mpeg4")
_DEMUXERS: dict[Container, str] = {"mp4": "mp4", "webm": "matroska"}
_ACCEPTED = "accepted: MP4 and WebM with H.264, H.265, VP8, VP9, AV1 or MPEG-4 video"


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """width, height: pixels of a frame, upright. rotation: degrees, counter-clockwise, that make it so.

    stamps: presentation times of all frames, ascending; keys: those of key frames. Both in the stream's time base.
    fps: frames per second, on average.
    """

    container: Container
    width: int
    height: int
    rotation: int
    fps: float
    stamps: tuple[int, ...] = field(repr=False)
    keys: tuple[int, ...] = field(repr=False)


def open_video(data: bytes, limits: MediaLimits) -> Video:
    """Header and limits of a whole file; one frame is decoded. Raises InvalidVideo. Blocks: call in a thread."""
    header = probe_video(data, limits)
    media_type = MEDIA_TYPES[header.container]
    identity = content_identity(media_type, header.width, header.height, data)
    source = EncodedFrames(data, header, limits.max_video_frame_pixels)
    return Video(identity, header.width, header.height, len(header.stamps), header.fps, source)


def probe_video(data: bytes, limits: MediaLimits) -> VideoHeader:
    container = container_of(data)
    if container is None:
        raise InvalidVideo(
            f"the data is not a video of an accepted type but {describe(data)}; {_ACCEPTED}"
            if data
            else f"the data is empty; {_ACCEPTED}",
            code="unsupported_video_type",
        )
    if cut_off(data, container):
        raise InvalidVideo(
            f"the {container} is truncated: it states a size that is more than its {len(data)} bytes",
            code="video_truncated",
        )
    with _opened(data, container, limits.max_video_frame_pixels) as (file, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        _check_size(width, height, limits)
        duration = (file.duration or 0) / 1_000_000
        _check_length(duration, stream.frames, limits)
        packets = [
            (packet.pts if packet.pts is not None else packet.dts, packet.is_keyframe)
            for packet in _counted(file.demux(stream), limits)
        ]
        stamps = tuple(sorted({stamp for stamp, _ in packets if stamp is not None}))
        if not stamps:
            raise InvalidVideo(f"the {container} holds no frames", code="video_empty")
        fps = float(stream.average_rate or 0) or _rate(stamps, float(stream.time_base))
        _check_length(len(stamps) / fps, len(stamps), limits)
        keys = tuple(sorted(stamp for stamp, key in packets if key and stamp is not None))
        file.seek(stamps[0], stream=stream)
        turned = round(next(iter(file.decode(stream))).rotation) % 360
    if turned in (90, 270):
        width, height = height, width
    return VideoHeader(container, width, height, turned, fps, stamps, keys)


@dataclass(frozen=True, slots=True)
class EncodedFrames:
    """The frames of a file in memory. max_pixels: of a frame; what turns out larger on the way is refused."""

    data: bytes = field(repr=False)
    header: VideoHeader
    max_pixels: int

    def read(self, indices: Sequence[int]) -> Iterator[bytes]:
        header = self.header
        with _opened(self.data, header.container, self.max_pixels) as (file, stream):
            frames: Iterator[Any] = iter(())
            at: int | None = None
            shown = b""
            for index in indices:
                wanted = header.stamps[index]
                if at is None or wanted > at:
                    key = bisect_right(header.keys, wanted) - 1
                    if at is None or (key >= 0 and header.keys[key] > at):
                        file.seek(header.keys[max(key, 0)], stream=stream)
                        frames = file.decode(stream)
                    frame = next((f for f in frames if f.pts is None or f.pts >= wanted), None)
                    if frame is None:
                        raise InvalidVideo(f"frame {index} of {len(header.stamps)} is missing")
                    at = wanted if frame.pts is None else frame.pts
                    shown = self._upright(frame)
                yield shown

    def _upright(self, frame: Any) -> bytes:
        pixels = np.rot90(frame.to_ndarray(format="rgb24"), self.header.rotation // 90)
        if pixels.shape[:2] != (self.header.height, self.header.width):
            raise InvalidVideo(
                f"its frames change from {self.header.width}x{self.header.height} to "
                f"{pixels.shape[1]}x{pixels.shape[0]} pixels on the way"
            )
        return np.ascontiguousarray(pixels).tobytes()


@contextmanager
def _opened(data: bytes, container: Container, max_pixels: int) -> Iterator[tuple[Any, Any]]:
    """An open file and its first video stream. Whatever PyAV raises within becomes InvalidVideo."""
    av = _av()
    try:
        with av.open(io.BytesIO(data), format=_DEMUXERS[container], metadata_errors="replace") as file:
            if not file.streams.video:
                what = "sound only" if file.streams.audio else "no video stream"
                raise InvalidVideo(f"the {container} holds {what}; {_ACCEPTED}", code="video_empty")
            stream = file.streams.video[0]
            codec = stream.codec_context
            if codec is None or codec.name not in CODECS:
                name = "an unknown codec" if codec is None else codec.name
                raise InvalidVideo(
                    f"the {container} is encoded with {name}; {_ACCEPTED}", code="unsupported_video_type"
                )
            codec.thread_count = 1  # frame threads would hold a frame each
            codec.options = {"max_pixels": str(max_pixels)}
            yield file, stream
    except FoveaError:
        raise
    except Exception as error:
        # FFmpeg's errors are of many Python kinds, and bindings add IndexError, StopIteration and MemoryError.
        raise InvalidVideo(f"the {container} can not be decoded: {_reason(error)}") from error


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise Unavailable(
            "videos need PyAV, which is not installed here; install it with: pip install 'fovea[video]'",
            code="video_unavailable",
        ) from error
    return av


def _counted(packets: Iterator[Any], limits: MediaLimits) -> Iterator[Any]:
    """Packets that hold a shown frame; the empty one that ends a stream does not."""
    count = 0
    for packet in packets:
        if packet.size and not packet.is_discard:
            count += 1
            _check_length(0.0, count, limits)
            yield packet


def _check_size(width: int, height: int, limits: MediaLimits) -> None:
    size = f"the video's frames are {width}x{height} pixels"
    if width < 1 or height < 1:
        raise InvalidVideo(f"{size}; both sides must be at least 1")
    if width * height > limits.max_video_frame_pixels:
        raise InvalidVideo(
            f"{size}, {width * height} in all; accepted: at most {limits.max_video_frame_pixels}",
            code="video_too_large",
        )
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise InvalidVideo(
            f"{size}; accepted: an aspect ratio of at most {limits.max_aspect_ratio:g}:1",
            code="video_too_large",
        )


def _check_length(seconds: float, frames: int, limits: MediaLimits) -> None:
    if seconds > limits.max_video_s:
        raise InvalidVideo(
            f"the video is {seconds:.1f} s long; accepted: at most {limits.max_video_s:g} s",
            code="video_too_long",
        )
    if frames > limits.max_video_frames:
        raise InvalidVideo(
            f"the video has {frames} frames or more; accepted: at most {limits.max_video_frames}",
            code="video_too_long",
        )


def _rate(stamps: Sequence[int], time_base: float) -> float:
    """Frames per second where the container does not say."""
    seconds = (stamps[-1] - stamps[0]) * time_base
    return (len(stamps) - 1) / seconds if seconds > 0 else 1.0


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "not enough memory for its frames"
    text = str(getattr(error, "strerror", "") or "") or "its data is damaged"
    return text[:200].lower()
