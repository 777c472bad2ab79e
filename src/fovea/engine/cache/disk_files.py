"""Files of the disk cache: named tensors as raw bytes, their file format, and their names.

The name of a cache file is 40 hex digits and a suffix, in the sub-folder of the first two digits. Everything
else is foreign, also links and folders with such names: it is neither counted nor changed.

The format is safetensors: eight bytes with the header's length, a JSON header, then the data without gaps.
Any safetensors reader can open such a file. The safetensors package does not write it, because its interface
for raw bytes needs memory addresses and differs between the versions that are accepted. No part of a file is
ever executed.

The first field of the header is a checksum over all other bytes of the file, at a fixed offset. So a file is
verified before any part of it is parsed. Tensors with wide elements come first, and the data begins at a
multiple of eight bytes, so that every tensor can be viewed in place.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fovea.core.private_files import check_owner

VERSION = "1"

# Name as in torch and numpy -> code of safetensors, and bytes per element.
DTYPES: dict[str, tuple[str, int]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
}
_NAMES = {code: name for name, (code, _) in DTYPES.items()}

_METADATA = "__metadata__"
_BEFORE = b'{"__metadata__":{"checksum":"'
_DIGEST = 16
_SUM_START = 8 + len(_BEFORE)
_SUM_END = _SUM_START + 2 * _DIGEST


class BadFile(Exception):
    """A file without the valid entry that its name stands for. The message says why."""


@dataclass(frozen=True, slots=True)
class Array:
    """One tensor. Raises ValueError if dtype, shape and data do not fit together.

    dtype: a name in DTYPES.
    data: the elements in C order, little-endian. It is a flat view of the caller's memory, not a copy.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.name}: dtype is {self.dtype!r}; accepted: {', '.join(DTYPES)}")
        if self.name == _METADATA:
            raise ValueError(f"a tensor cannot be called {_METADATA}")
        view = memoryview(self.data)
        expected = math.prod(self.shape) * self.itemsize
        if min(self.shape, default=0) < 0 or view.nbytes != expected:
            raise ValueError(
                f"{self.name}: {view.nbytes} bytes for {self.dtype}{list(self.shape)}, not {expected}"
            )
        object.__setattr__(self, "data", view.cast("B") if view.nbytes else memoryview(b""))

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def nbytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Arrays:
    """The tensors of one entry, in the caller's order. Raises ValueError if two have the same name."""

    items: tuple[Array, ...]

    def __post_init__(self) -> None:
        if len({array.name for array in self.items}) != len(self.items):
            raise ValueError(f"names repeat: {[array.name for array in self.items]}")

    def __getitem__(self, name: str) -> Array:
        """The tensor of that name. Raises KeyError."""
        for array in self.items:
            if array.name == name:
                return array
        raise KeyError(name)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.items)


def encode(key: str, arrays: Arrays) -> list[memoryview]:
    """The file as pieces, to be written one after the other. The data is not copied."""
    ordered = sorted(arrays.items, key=lambda array: -array.itemsize)
    starts: dict[str, int] = {}
    end = 0
    for array in ordered:
        starts[array.name] = end
        end += array.nbytes
    header: dict[str, object] = {
        _METADATA: {"checksum": "0" * 2 * _DIGEST, "format": "fovea", "version": VERSION, "key": key}
    }
    for array in arrays.items:
        start = starts[array.name]
        header[array.name] = {
            "dtype": DTYPES[array.dtype][0],
            "shape": list(array.shape),
            "data_offsets": [start, start + array.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = bytearray(struct.pack("<Q", len(text)) + text)
    pieces = [memoryview(head), *(memoryview(array.data) for array in ordered)]
    head[_SUM_START:_SUM_END] = _checksum(pieces)
    return pieces


def decode(blob: bytearray, key: str) -> Arrays:
    """The tensors of `key`, as views of `blob`.

    Raises BadFile unless `encode` made exactly these bytes for this key.
    """
    view = memoryview(blob)
    if len(view) < _SUM_END or view[8:_SUM_START] != _BEFORE:
        raise BadFile("it does not begin as a file of this cache does")
    if view[_SUM_START:_SUM_END] != _checksum([view]):
        raise BadFile("its checksum differs: it is damaged or cut off")
    try:
        return _parse(view, key)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadFile(f"its header cannot be parsed: {error!r}") from error


def _parse(view: memoryview, key: str) -> Arrays:
    (length,) = struct.unpack("<Q", view[:8])
    header = json.loads(bytes(view[8 : 8 + length]))
    metadata = header.pop(_METADATA)
    if metadata.get("version") != VERSION:
        raise BadFile(f"its format version is {metadata.get('version')!r}, not {VERSION!r}")
    if metadata.get("key") != key:
        raise BadFile("it was written for another key")
    data = view[8 + length :]
    items = []
    for name, spec in header.items():
        start, end = spec["data_offsets"]
        items.append(Array(name, _NAMES[spec["dtype"]], tuple(spec["shape"]), data[start:end]))
    return Arrays(tuple(items))


def _checksum(pieces: list[memoryview]) -> bytes:
    """The checksum of all bytes except its own. The first piece must include all of the checksum's place."""
    digest = hashlib.blake2b(pieces[0][:_SUM_START], digest_size=_DIGEST)
    digest.update(pieces[0][_SUM_END:])
    for piece in pieces[1:]:
        digest.update(piece)
    return digest.hexdigest().encode()


SUFFIX = ".fovea.safetensors"
_SHARD = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{40}\.fovea\.safetensors")
_TEMPORARY = re.compile(r"\.[0-9a-f]{40}\.[0-9a-f]{16}\.tmp")


class ForeignFile(Exception):
    """Raised if `path`, the place of an entry or sub-folder, has something that is not the cache's."""

    def __init__(self, path: str) -> None:
        super().__init__("it is not a file of this cache")
        self.path = path


class CacheFile(NamedTuple):
    """A file of the cache. Files are ordered by their last use.

    used_at: time of the last hit, in seconds since the epoch.
    written_at: time when it was written, in seconds since the epoch.
    size: bytes.
    temporary: whether it is still being written, or was abandoned then.
    """

    used_at: float
    written_at: float
    size: int
    path: str
    temporary: bool


def path_of(folder: Path, key: str) -> Path:
    """The path of a key's entry.

    The format's version is part of it, so releases that share a folder do not conflict.
    """
    seed = f"fovea:{VERSION}:{key}".encode("utf-8", "surrogatepass")
    name = hashlib.blake2b(seed, digest_size=20).hexdigest()
    return folder / name[:2] / (name + SUFFIX)


def measure(path: Path) -> CacheFile | None:
    """The entry at `path`, or None if there is none. Raises ForeignFile for anything but a regular file."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(status.st_mode):
        raise ForeignFile(str(path))
    return CacheFile(status.st_atime, status.st_mtime, status.st_size, str(path), False)


def read_file(path: str, limit: int, now: float) -> bytearray:
    """Read an entry and mark it as used at `now`.

    Returns a writable buffer that belongs to the caller, so it can be viewed as a tensor without a copy.
    Raises OSError, also for a file that another user can change, and BadFile if the file is larger than
    `limit` bytes or ends early.
    """
    # NONBLOCK: to open a pipe with this name would otherwise wait for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        check_owner(descriptor)
        status = os.fstat(descriptor)
        if status.st_size > limit:
            raise BadFile(f"it has {status.st_size} bytes, and the whole cache may have {limit}")
        data = bytearray(status.st_size)
        view = memoryview(data)
        done = 0
        while done < len(data) and (got := file.readinto(view[done:])):
            done += got
        if done < len(data):
            raise BadFile(f"it ended after {done} of {len(data)} bytes")
        # By descriptor, so that a file that replaced this one meanwhile keeps its own times.
        with suppress(OSError):
            os.utime(descriptor, ns=(int(now * 1e9), status.st_mtime_ns))
    return data


def write_file(path: Path, pieces: Sequence[memoryview], now: float) -> None:
    """Write a temporary file next to `path` and rename it, so that no process reads a partial file.

    A power failure may leave a damaged file; its checksum then differs. Raises ForeignFile and OSError, and
    leaves no temporary file then.
    """
    with suppress(FileExistsError):
        os.mkdir(path.parent, 0o700)
    if not stat.S_ISDIR(os.lstat(path.parent).st_mode):
        raise ForeignFile(str(path.parent))  # a link could lead out of the folder
    name = path.name.removesuffix(SUFFIX)
    temporary = path.parent / f".{name}.{secrets.token_hex(8)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            write_all(descriptor, pieces)
            os.utime(descriptor, ns=(int(now * 1e9), int(now * 1e9)))
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def write_all(descriptor: int, pieces: Sequence[memoryview]) -> None:
    for piece in pieces:
        done = 0
        while done < len(piece):
            done += os.write(descriptor, piece[done:])


def scan(folder: Path) -> Iterator[CacheFile]:
    """All files of the cache.

    Files that are removed meanwhile are left out. Raises OSError if `folder` cannot be read.
    """
    with os.scandir(folder) as entries:
        shards = [entry.path for entry in entries if _SHARD.fullmatch(entry.name) and _is_folder(entry)]
    for shard in shards:
        with suppress(OSError), os.scandir(shard) as entries:
            for entry in entries:
                file = _cache_file(entry, os.path.basename(shard))
                if file is not None:
                    yield file


def _is_folder(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return entry.is_dir(follow_symlinks=False)
    return False


def _cache_file(entry: os.DirEntry[str], shard: str) -> CacheFile | None:
    temporary = _TEMPORARY.fullmatch(entry.name) is not None
    if not (temporary or _ENTRY.fullmatch(entry.name)) or not entry.name.lstrip(".").startswith(shard):
        return None
    with suppress(OSError):
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            return CacheFile(status.st_atime, status.st_mtime, status.st_size, entry.path, temporary)
    return None
