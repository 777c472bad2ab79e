"""Files of the disk cache: their names, and how they are written atomically, read, and listed.

The name of a cache file is 40 hex digits and a suffix, in the sub-folder of the first two digits. Everything
else is foreign, also links and folders with such names: it is neither counted nor changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fovea.core.private_files import check_owner
from fovea.engine.cache.arrays import VERSION, BadFile

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
