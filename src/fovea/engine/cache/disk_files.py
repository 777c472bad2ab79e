"""Files of the disk cache: their names, how one is written whole or not at all, how one is read, how all are found.

A name says whether a file is ours: 40 hex digits and a suffix, in the sub-folder of the first two digits. Anything
else, links and folders under such names included, belongs to someone else and is neither counted nor touched.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fovea.engine.cache.arrays import VERSION, BadFile

SUFFIX = ".fovea.safetensors"
_SHARD = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{40}\.fovea\.safetensors")
_TEMPORARY = re.compile(r"\.[0-9a-f]{40}\.[0-9a-f]{16}\.tmp")


class NotOurs(Exception):
    """Something that we have not made stands at `path`, where an entry or its sub-folder would."""

    def __init__(self, path: str) -> None:
        super().__init__("something else has its name")
        self.path = path


class Found(NamedTuple):
    """One file of the cache. Times in seconds: `used` is set on every hit, `written` once."""

    used: float
    written: float
    size: int
    path: str
    temporary: bool


def path_of(folder: Path, key: str) -> Path:
    """Where `key` lives. The version is part of the name, so that two releases sharing a folder never meet."""
    seed = f"fovea:{VERSION}:{key}".encode("utf-8", "surrogatepass")
    name = hashlib.blake2b(seed, digest_size=20).hexdigest()
    return folder / name[:2] / (name + SUFFIX)


def measure(path: Path) -> Found | None:
    """The entry at `path`, None when there is none. Raises NotOurs for anything but a regular file."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(status.st_mode):
        raise NotOurs(str(path))
    return Found(status.st_atime, status.st_mtime, status.st_size, str(path), False)


def read_file(path: str, limit: int, now: float) -> bytearray:
    """The bytes of an entry, which is marked as used. Raises OSError, BadFile.

    The buffer is writable and the caller's own: it can be viewed as a tensor without a copy.
    """
    # NONBLOCK: a pipe under this name would wait for a writer for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if status.st_size > limit:
            raise BadFile(f"it has {status.st_size} bytes, the whole cache {limit}")
        data = bytearray(status.st_size)
        view = memoryview(data)
        done = 0
        while done < len(data) and (got := file.readinto(view[done:])):
            done += got
        if done < len(data):
            raise BadFile(f"it ended after {done} of {len(data)} bytes")
        # By descriptor: what another process has put under this name meanwhile keeps its own times.
        with suppress(OSError):
            os.utime(descriptor, ns=(int(now * 1e9), status.st_mtime_ns))
    return data


def write_file(path: Path, pieces: Sequence[memoryview], now: float) -> None:
    """Write beside `path` and rename, so that nobody ever sees a part. Raises NotOurs, OSError and leaves nothing behind.

    A power cut may leave a damaged file, which its checksum betrays.
    """
    with suppress(FileExistsError):
        os.mkdir(path.parent, 0o700)
    if not stat.S_ISDIR(os.lstat(path.parent).st_mode):
        raise NotOurs(str(path.parent))  # a link would lead out of the folder that is counted
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


def scan(folder: Path) -> Iterator[Found]:
    """Every file of ours. What vanishes meanwhile is left out. Raises OSError when `folder` itself cannot be read."""
    with os.scandir(folder) as entries:
        shards = [entry.path for entry in entries if _SHARD.fullmatch(entry.name) and _is_folder(entry)]
    for shard in shards:
        with suppress(OSError), os.scandir(shard) as entries:
            for entry in entries:
                found = _found(entry, os.path.basename(shard))
                if found is not None:
                    yield found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return entry.is_dir(follow_symlinks=False)
    return False


def _found(entry: os.DirEntry[str], shard: str) -> Found | None:
    temporary = _TEMPORARY.fullmatch(entry.name) is not None
    if not (temporary or _ENTRY.fullmatch(entry.name)) or not entry.name.lstrip(".").startswith(shard):
        return None
    with suppress(OSError):
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            return Found(status.st_atime, status.st_mtime, status.st_size, entry.path, temporary)
    return None
