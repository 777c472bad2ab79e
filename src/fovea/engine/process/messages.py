"""The messages between a server and the process of its engine, over a pair of connected sockets.

A message is a pickled value with its length before it. Unpickling runs whatever a message says, so it is safe
only between processes that trust each other. These do: both run the same code with the same rights, and
the pair has no address. The server creates it and the engine's process inherits its end, so no other process
can write into it.

Pixels of images and frames of videos stay with the server until the engine asks for them, and then take
another road (`road`). An image whose encoder output is cached is never decoded nor copied.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from enum import IntEnum
from types import MappingProxyType
from typing import Any, BinaryIO

from fovea.core.errors import FoveaError
from fovea.core.media import FrameSource, Image, PixelSource, Rgb, UnreadPixels, Video

LENGTH = struct.Struct("<Q")
Entry = tuple[Any, ...]
"""(kind, number, values ...). number: of the stream, call or question that it belongs to."""


class Kind(IntEnum):
    """Kinds of entries. From the server: STREAM to FAILED; from the engine: READY to LOADED."""

    STREAM = 0  # request
    CANCEL = 1
    CALL = 2  # name of the method, arguments
    ITEM = 3  # pixels, a file, or one frame of several, as `Road.send` returns them; seconds of decoding
    DONE = 4  # the answer to a question, complete
    FAILED = 5  # the error of a question

    READY = 10  # ModelInfo, most choices in flight
    TEXT = 11  # fields of a delta that has nothing but text and tokens
    DELTA = 12  # delta
    END = 13  # a stream has ended
    RESULT = 14  # of a call
    ERROR = 15  # of a stream, a call, or of loading
    ASK = 16  # number of a source, method, arguments
    MORE = 17  # whether the frames are not wanted any more
    FORGET = 18  # the number is that of a source
    STATE = 19  # status, figures
    LOADED = 20  # bytes of weights: loaded, and in all


class Lent:
    """Stands in a message for the pixels or frames that stay with the server."""

    def __init__(self, source: Rgb | PixelSource | FrameSource, size: int, seconds: float) -> None:
        self.source = source
        self.size = size
        self.seconds = seconds


class _Packer(pickle.Pickler):
    """Pickles a message of the server. lend: keeps a source, and returns its number."""

    def __init__(self, file: BinaryIO, lend: Callable[[Any], int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._lend = lend

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Image) and not isinstance(value.pixels, UnreadPixels):
            lent = Lent(value.pixels, value.held_bytes, value.decode_s)
            return Image, (value.identity, value.width, value.height, lent)
        if isinstance(value, Video):
            fields = value.identity, value.width, value.height, value.frames, value.fps
            return Video, (*fields, Lent(value.source, 0, 0.0), value.preselected)
        return _reduce(value)

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Lent):
            is_video = not isinstance(value.source, Rgb) and hasattr(value.source, "check")
            return self._lend(value.source), is_video, value.size, value.seconds
        return None


class _Answers(pickle.Pickler):
    """Pickles a message of the engine."""

    def reducer_override(self, value: Any) -> Any:
        return _reduce(value)


class _Unpacker(pickle.Unpickler):
    """Reads a message of the server. borrow: makes a source out of what its number names."""

    def __init__(self, file: BinaryIO, borrow: Callable[..., Any]) -> None:
        super().__init__(file)
        self._borrow = borrow

    def persistent_load(self, names: Any) -> Any:
        return self._borrow(*names)


def pack(entry: Entry, lend: Callable[[Any], int]) -> bytes:
    """Return an entry of the server as a message."""
    file = io.BytesIO()
    _Packer(file, lend).dump(entry)
    return file.getvalue()


def unpack(data: bytes | memoryview, borrow: Callable[..., Any]) -> Entry:
    entry: Entry = _Unpacker(io.BytesIO(data), borrow).load()
    return entry


def pack_answers(entries: list[Entry]) -> bytes:
    """Return entries of the engine as a message with its length."""
    file = io.BytesIO()
    _Answers(file, pickle.HIGHEST_PROTOCOL).dump(entries)
    data = file.getvalue()
    return LENGTH.pack(len(data)) + data


def unpack_answers(data: bytes) -> list[Entry]:
    entries: list[Entry] = pickle.loads(data)
    return entries


def _reduce(value: Any) -> Any:
    """Reduce values that pickle cannot copy: read-only mappings, and errors with arguments of their own."""
    if isinstance(value, MappingProxyType):
        return _read_only, (dict(value),)
    if isinstance(value, FoveaError):
        return _error, (type(value), value.args, dict(value.__dict__))
    return NotImplemented


def _read_only(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(values)


def _error(kind: type[FoveaError], args: tuple[Any, ...], values: dict[str, Any]) -> FoveaError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(values)
    return error
