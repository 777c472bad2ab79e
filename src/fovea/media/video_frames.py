"""Decodes frames in order from a key frame on, and refuses damaged data instead of guessing.

FFmpeg's decoders conceal damage: they paint over it, or go on with wrong pixels. So they are told to report
all that they notice, and a report ends the video. But a report can be about a file that is whole: frames that
lead a key frame may refer to frames before it, and after a recovery point it takes a while until pictures are
complete. So reports about frames before the key frame are ignored, and a frame that does not follow its key
frame complete is decoded from an earlier one. If there is none, because an H.264 stream was cut at a recovery
point, its first frames are decoded without reports.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from fovea.core.errors import InvalidVideo
from fovea.media.video_container import DAMAGED, UNDAMAGED

Key = Literal["closed", "open", "rolling"]
"""How much can be decoded from a key frame on: all, all but frames that lead it, or more with every frame."""
STRICT = {"err_detect": "explode+crccheck+bitstream+buffer+careful"}
"""FFmpeg's option for decoders that report damage. Its further flags refuse files that are whole, too."""

_CHECKING = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
"""Codecs with a second decoder that notices if a frame ends too early. FFmpeg's own decoder does not."""


class Stamps(NamedTuple):
    """Presentation times in the stream's time base, ascending.

    frames: of all frames.
    keys: of the key frames.
    seconds: length of one unit.
    """

    frames: tuple[int, ...]
    keys: tuple[int, ...]
    seconds: float


class FrameReader:
    """Reads frames of an open video, from front to back.

    av: PyAV's module.
    file, stream: its open file, and the video stream of it.
    decoder: a codec context for the stream.
    each_packet: called before each packet is decoded; may raise to stop.
    """

    def __init__(
        self, av: Any, file: Any, stream: Any, decoder: Any, stamps: Stamps, each_packet: Callable[[], None]
    ) -> None:
        self._av, self._file, self._stream, self._decoder = av, file, stream, decoder
        self._stamps = stamps
        self._each_packet = each_packet
        self._strict = decoder
        self._lenient: Any = None
        self._frames: Iterator[Any] = iter(())
        self._at: int | None = None
        self._complete = False
        self._key: Key = "closed"  # at which decoding began last
        self._back = 0  # key frames before the last one at which decoding has to begin

    def find(self, index: int) -> Any:
        """Return the frame with this index, or the next one if a whole file has none at its time.

        index: at least that of the call before.
        Raises InvalidVideo if data that the frame needs is damaged.
        """
        frames, keys, _ = self._stamps
        if not keys:
            raise InvalidVideo(
                f"the video is damaged: none of its {len(frames)} frames is a key frame, so none can be "
                f"decoded; {UNDAMAGED}",
                code=DAMAGED,
            )
        key = max(bisect_right(keys, frames[index]) - 1, 0)
        at = self._at
        if at is None or (index > at + 1 and keys[max(key - self._back, 0)] > frames[at]):
            frame = self._search(key, frames[index])
        else:
            try:
                frame = self._next(frames[index])
            except InvalidVideo as error:
                if error.code != DAMAGED:
                    raise
                frame = self._search(key, frames[index])
        if frame is None:
            raise self._damage(frames[index], "it is missing")
        self._at = index if frame.pts is None else bisect_left(frames, frame.pts)
        return frame

    def _search(self, key: int, wanted: int) -> Any:
        """Decode from a key frame, or from earlier ones until the wanted frame follows complete."""
        while True:
            start = max(key - self._back, 0)
            try:
                self._seek(start, key)
                frame = self._next(wanted)
                if start == 0 or (self._complete and self._key != "rolling"):
                    return frame
            except InvalidVideo as error:
                if error.code != DAMAGED or (self._back and start):
                    raise
                if start == 0:
                    if self._key == "closed" or self._lenient is not None:
                        raise
                    self._lenient = self._new_decoder()
                    continue
            self._back = len(self._stamps.keys) if self._key == "rolling" else 2 * self._back + 1

    def _new_decoder(self) -> Any:
        """Return a decoder that conceals damage."""
        own = self._stream.codec_context
        decoder = self._av.CodecContext.create(own.name, "r")
        decoder.extradata = own.extradata
        decoder.thread_count = 1
        decoder.options = {name: value for name, value in own.options.items() if name not in STRICT}
        return decoder

    def _seek(self, start: int, key: int) -> None:
        """Go to the key frame `start`. Reports about frames before the key frame `key` will be ignored."""
        keys = self._stamps.keys
        self._file.seek(keys[start], stream=self._stream)
        decoder = self._strict if start or self._lenient is None else self._lenient
        decoder.flush_buffers()
        self._frames = self._decoded(decoder, keys[key])
        self._complete, self._key = False, "closed"

    def _next(self, wanted: int) -> Any:
        """Return the next frame at or after a time; None at the end. Notes whether pictures are complete."""
        for frame in self._frames:
            self._complete = self._complete or frame.pts is None or frame.pts <= wanted
            if frame.pts is None or frame.pts >= wanted:
                return frame
        return None

    def _decoded(self, decoder: Any, first: int) -> Iterator[Any]:
        """Yield the frames that follow. Raises InvalidVideo for a report about one at or after `first`."""
        begun = False
        for packet in self._file.demux(self._stream):
            self._each_packet()
            time = packet.dts if packet.pts is None else packet.pts
            if packet.is_keyframe and not begun:
                self._key, begun = _key_of(packet, self._stream.codec_context), True
            try:
                frames = self._decode(decoder, packet)
            except self._av.FFmpegError as error:
                if isinstance(error, MemoryError):
                    raise
                if time is not None and time < first:
                    continue
                raise self._damage(time, error.strerror) from error
            for frame in frames:
                if frame.is_corrupt and decoder is self._strict and (frame.pts or first) >= first:
                    raise self._damage(frame.pts, "its decoder marks it as corrupt")
                yield frame

    def _decode(self, decoder: Any, packet: Any) -> list[Any]:
        """Decode a packet; if that fails, without its messages (SEI), which some cameras write wrongly."""
        try:
            frames: list[Any] = decoder.decode(packet if packet.size else None)
        except self._av.FFmpegError:
            units = list(_units(packet, self._stream.codec_context))
            kept = [unit for kind, unit in units if kind != "message"]
            if len(kept) == len(units):
                raise
            bare = self._av.Packet(b"".join(kept))
            bare.pts, bare.dts, bare.time_base = packet.pts, packet.dts, packet.time_base
            frames = decoder.decode(bare)
        return frames

    def _damage(self, time: int | None, reason: str) -> InvalidVideo:
        frames, _, seconds = self._stamps
        place = "its end"
        if time is not None:
            index = bisect_left(frames, time)
            at_s = (time - frames[0]) * seconds
            place = f"frame {index} of {len(frames)} ({at_s:.2f} s, first frame: 0)"
        return InvalidVideo(f"the video is damaged at {place}: {reason.lower()}; {UNDAMAGED}", code=DAMAGED)


def checking_decoder(av: Any, stream: Any, options: dict[str, str]) -> Any:
    """Return the decoder that notices most damage in a stream: its own codec context or another one."""
    own = stream.codec_context
    name = _CHECKING.get(own.name)
    if name is None or own.format is None or own.format.components[0].bits > 8:
        return own  # libvpx is often built for 8 bits only
    try:
        decoder = av.CodecContext.create(name, "r")
    except ValueError:  # this PyAV is built without it
        return own
    decoder.extradata = own.extradata
    decoder.thread_count = 1
    decoder.options = options
    return decoder


def _key_of(packet: Any, codec: Any) -> Key:
    """Return the kind of a key frame. Only in H.264 it matters: its frames may refer to any earlier one."""
    if codec.name != "h264":
        return "closed"
    kinds = [kind for kind, _ in _units(packet, codec)]
    if "closed" in kinds:
        return "closed"
    return "rolling" if "inter" in kinds else "open"


def _units(packet: Any, codec: Any) -> Iterator[tuple[str, bytes]]:
    """Yield what each unit of a packet of H.264 or H.265 is, and its bytes with their length before them.

    "closed", "inter": slices of a frame before which nothing is needed, and of one that is not intra (H.264).
    "message": information beside the pictures. In H.265 only that before a picture; checksums follow it.
    """
    place = {"h264": 4, "hevc": 21}.get(codec.name)  # ISO 14496-15, 5.3.3.1 and 8.3.3.1
    if place is None:
        return
    header = codec.extradata or b""
    width = (header[place] & 3) + 1 if header[:1] == b"\1" and len(header) > place else 4
    data, at = bytes(packet), 0
    while at + width + 1 < len(data):
        end = at + width + int.from_bytes(data[at : at + width], "big")
        yield _kind_of(codec.name, *data[at + width : at + width + 2]), data[at:end]
        at = end


def _kind_of(codec: str, head: int, first: int) -> str:
    """Return what a unit is, by its first two bytes."""
    if codec == "hevc":
        return "message" if head >> 1 == 39 else ""
    if head & 31 == 1:  # after the number of its first block, 0, a slice has its type: 2 and 7 are intra
        return "" if first & 0xF0 == 0xB0 or first == 0x88 else "inter"
    return {5: "closed", 6: "message"}.get(head & 31, "")
