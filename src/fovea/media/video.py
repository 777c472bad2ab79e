"""Reads a video's header, and decodes its frames on demand. No other module gives data from clients to PyAV.

The order matters, as with images. Signature and container come first, so that exactly one demuxer is used and
no playlist or network protocol. Then the header is compared with every limit, and the packets are counted
without decoding. Then one frame is decoded, to check the codec and to read the rotation. Later, frames are
decoded on demand: the reader seeks to the last key frame before a requested frame, converts only requested
frames, and holds one frame at a time. How many frames that decodes is known from the packets, and bounded.
"""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fovea.core.errors import FoveaError, InvalidVideo, Unavailable
from fovea.core.media import Abandoned, FrameSource, Video, content_identity
from fovea.core.names import install_command
from fovea.media.image.probe import describe
from fovea.media.limits import MediaLimits
from fovea.media.video_container import (
    DAMAGED,
    MEDIA_TYPES,
    UNDAMAGED,
    Container,
    check_blocks,
    container_of,
    is_truncated,
)
from fovea.media.video_frames import STRICT, FrameReader, Stamps, checking_decoder

CODECS = ("h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "mpeg4")
VIDEO_UNAVAILABLE = "video_unavailable"
_SPARE_FRAMES = 300
"""Frames that may be decoded beyond the expected ones: some containers find a place only roughly."""
_DEMUXERS: dict[Container, str] = {"mp4": "mp4", "webm": "matroska"}
_ACCEPTED = "accepted: MP4 and WebM with H.264, H.265, VP8, VP9, AV1 or MPEG-4 video"


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """The facts in a video's header and packets.

    width, height: pixels of an upright frame.
    rotation: degrees, counter-clockwise, that turn a stored frame upright.
    fps: frames per second, on average.
    stamps: presentation times of all frames, ascending, in the stream's time base.
    keys: presentation times of the key frames, ascending, in the stream's time base.
    """

    container: Container
    width: int
    height: int
    rotation: int
    fps: float
    stamps: tuple[int, ...] = field(repr=False)
    keys: tuple[int, ...] = field(repr=False)


def open_video(data: bytes, limits: MediaLimits) -> Video:
    """Read a whole file's header and check the limits. One frame is decoded. Blocks: call in a thread.

    Raises InvalidVideo, or Unavailable if PyAV is not installed.
    """
    header = probe_video(data, limits)
    return video_of(data, header, EncodedFrames(data, header, limits))


def video_of(data: bytes, header: VideoHeader, source: FrameSource) -> Video:
    """Return the video of a file whose header was read. Hashes all bytes: call in a thread."""
    media_type = MEDIA_TYPES[header.container]
    identity = content_identity(media_type, header.width, header.height, data)
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
    if is_truncated(data, container):
        raise InvalidVideo(
            f"the {container} is truncated: it states a size that is more than its {len(data)} bytes",
            code="video_truncated",
        )
    with _open_stream(data, container, limits.max_video_frame_pixels) as (file, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        _check_size(width, height, limits)
        duration = (file.duration or 0) / 1_000_000
        _check_length(duration, stream.frames, limits)
        packets = [
            (packet.pts if packet.pts is not None else packet.dts, packet.is_keyframe)
            for packet in _frame_packets(file.demux(stream), limits)
        ]
        if container == "webm":
            check_blocks(data, len(packets))
        stamps = tuple(sorted({stamp for stamp, _ in packets if stamp is not None}))
        if not stamps:
            raise InvalidVideo(f"the {container} holds no frames", code="video_empty")
        fps = float(stream.average_rate or 0) or _rate(stamps, float(stream.time_base))
        _check_length(len(stamps) / fps, len(stamps), limits)
        keys = tuple(sorted(stamp for stamp, key in packets if key and stamp is not None))
        times = Stamps(stamps, keys, float(stream.time_base))
        reader = FrameReader(_av(), file, stream, stream.codec_context, times, lambda: None)
        rotation = round(reader.find(0).rotation) % 360
    if rotation in (90, 270):
        width, height = height, width
    return VideoHeader(container, width, height, rotation, fps, stamps, keys)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class EncodedFrames:
    """The frames of a video file in memory, a `core.media.FrameSource`.

    limits: a frame that turns out larger than its `max_video_frame_pixels` raises InvalidVideo, and so do
        files that need more decoding than their header says.
    """

    data: bytes = field(repr=False)
    header: VideoHeader
    limits: MediaLimits

    def check(self, indices: Sequence[int]) -> None:
        check_work(self.header, indices, self.limits)

    def read(self, indices: Sequence[int], abandoned: Callable[[], bool] = lambda: False) -> Iterator[bytes]:
        header = self.header
        self.check(indices)
        most = 2 * frames_to_decode(header, indices) + _SPARE_FRAMES

        def each_packet() -> None:
            nonlocal most
            most -= 1
            if most < 0:
                raise InvalidVideo(
                    "the video's key frames are not where its header states: after more than twice the "
                    f"expected number of frames, the wanted ones were not found; {UNDAMAGED}"
                )
            if abandoned():
                raise Abandoned

        pixels = self.limits.max_video_frame_pixels
        with _open_stream(self.data, header.container, pixels) as (file, stream):
            decoder = checking_decoder(_av(), stream, _options(pixels))
            times = Stamps(header.stamps, header.keys, float(stream.time_base))
            reader = FrameReader(_av(), file, stream, decoder, times, each_packet)
            at: int | None = None
            rgb = b""
            for index in indices:
                wanted = header.stamps[index]
                if at is None or wanted > at:
                    frame = reader.find(index)
                    at = wanted if frame.pts is None else frame.pts
                    rgb = self._upright_rgb(frame)
                yield rgb

    def _upright_rgb(self, frame: Any) -> bytes:
        pixels = np.rot90(frame.to_ndarray(format="rgb24"), self.header.rotation // 90)
        if pixels.shape[:2] != (self.header.height, self.header.width):
            raise InvalidVideo(
                f"its frames change from {self.header.width}x{self.header.height} to "
                f"{pixels.shape[1]}x{pixels.shape[0]} pixels on the way"
            )
        return np.ascontiguousarray(pixels).tobytes()


def frames_to_decode(header: VideoHeader, indices: Sequence[int]) -> int:
    """Return how many frames are decoded to read these: from the last key frame before each of them on."""
    count, at = 0, -1
    for index in indices:
        if index <= at:
            continue
        key = bisect_right(header.keys, header.stamps[index]) - 1
        start = bisect_left(header.stamps, header.keys[key]) if key >= 0 else 0
        count += index - max(at, start - 1)
        at = index
    return count


def check_work(header: VideoHeader, indices: Sequence[int], limits: MediaLimits) -> None:
    """Raise InvalidVideo if reading these frames decodes more than the limits allow."""
    count = frames_to_decode(header, indices)
    work = count * header.width * header.height // 1_000_000
    if work > limits.max_video_decode_mpx:
        raise InvalidVideo(
            f"for {len(set(indices))} frames of the video, {count} frames of {header.width}x{header.height} "
            f"have to be decoded, {work} megapixels; accepted: at most {limits.max_video_decode_mpx}. Send "
            "it shorter or smaller, or with more key frames",
            code="video_too_large",
        )


def warm_up_decoders(limits: MediaLimits) -> None:
    """Make a video of two frames and read it, so that PyAV has loaded all that it loads at its first use.

    Raises Unavailable without PyAV.
    """
    av = _av()
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=2)
        stream.width = stream.height = 16
        for _ in range(2):
            frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    for _ in open_video(out.getvalue(), limits).source.read([0, 1]):
        pass


@contextmanager
def _open_stream(data: bytes, container: Container, max_pixels: int) -> Iterator[tuple[Any, Any]]:
    """Yield an open file and its first video stream. Every error of PyAV within becomes InvalidVideo."""
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
            codec.thread_count = 1  # every frame thread would hold a frame
            codec.options = _options(max_pixels)
            yield file, stream
    except (FoveaError, Abandoned):
        raise
    except Exception as error:
        # FFmpeg's errors have many Python types, and PyAV adds IndexError, StopIteration and MemoryError.
        raise InvalidVideo(f"the {container} cannot be decoded: {_reason(error)}") from error


def _options(max_pixels: int) -> dict[str, str]:
    """Return the options of a decoder."""
    return STRICT | {"max_pixels": str(max_pixels)}


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise Unavailable(
            f"videos need PyAV, which is not installed here; install it with: {install_command('video')}",
            code=VIDEO_UNAVAILABLE,
            scope="request",
        ) from error
    return av


def _frame_packets(packets: Iterator[Any], limits: MediaLimits) -> Iterator[Any]:
    """Yield the packets that hold a visible frame, within the limits. The empty last packet holds none."""
    count = 0
    for packet in packets:
        if packet.is_corrupt:
            raise InvalidVideo(
                f"the video is damaged at frame {count} (first frame: 0): it is incomplete; {UNDAMAGED}",
                code=DAMAGED,
            )
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
    """Return the frames per second from presentation times, for a container that does not state them."""
    seconds = (stamps[-1] - stamps[0]) * time_base
    return (len(stamps) - 1) / seconds if seconds > 0 else 1.0


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "not enough memory for its frames"
    text = str(getattr(error, "strerror", "") or "") or "its data is damaged"
    return text[:200].lower()
