"""Folders and files that no other user can change. Code and trusted data are loaded from no others.

A file is safe if its owner and the owners of all folders on its path are this user or root, and if nobody
else may write to any of them. A folder in which everyone may write, but only an owner may rename (/tmp, the
sticky bit), is safe as a parent. Nobody but this user can change a path that passed, so the file may be
loaded by its name later.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

MOST_LINKS = 40
"""Most symbolic links on one path, as in Linux."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def exposure(path: Path, *, may_be_link: bool = False) -> str | None:
    """Return why another user could change a file or folder, or None if nobody else can.

    The path need not exist; then its existing parents are checked. Symbolic links are followed, and every
    folder on the way is checked.

    may_be_link: whether the path itself may be a link.
    """
    whole = Path.cwd() / path
    try:
        if not may_be_link and whole.is_symlink():
            return f"{whole} is a symbolic link"
        for step, status, is_last in _walk(whole):
            reason = _exposed(step, status, is_last)
            if reason:
                return reason
    except OSError as error:
        return f"{whole} cannot be examined: {error.strerror}"
    return None


def is_mounted_alone(path: Path) -> bool:
    """Tell whether a file is mounted alone (a bind mount of one file), as in some containers.

    If such a file is replaced on the host, as editors do, this process keeps the old file. False if the
    mounts of this system cannot be read.
    """
    try:
        name = str(path.resolve())
        with open("/proc/self/mountinfo", encoding="utf-8") as mounts:
            return any(line.split(" ", 5)[4] == name for line in mounts)
    except (OSError, ValueError, IndexError):
        return False


def private_folder(path: Path, *, may_be_link: bool = False) -> str | None:
    """Create a folder for this user alone (mode 0700) unless it exists, and return its `exposure`."""
    reason = exposure(path, may_be_link=may_be_link)
    if reason is not None:
        return reason
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return exposure(path, may_be_link=may_be_link)


def temporary_folder() -> Path:
    """Return a fresh folder of this process (mode 0700), which is removed when the process ends.

    Raises OSError if there is no place for one that others cannot change.
    """
    folder = Path(tempfile.mkdtemp(prefix="fovea-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    reason = exposure(folder)
    if reason is not None:
        raise PermissionError(f"there is no private folder for temporary files: {reason}")
    return folder


def open_private(path: Path) -> BufferedReader:
    """Open a file that nobody else can change, to read it. The folder must be known to be private.

    Raises OSError, also for a link and for a file of another user.
    """
    # NONBLOCK: to open a pipe would otherwise wait for ever.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        check_owner(file.fileno())
    except BaseException:
        file.close()
        raise
    return file


def read_private(path: Path) -> bytes:
    """Return the content of a file as by `open_private`. Raises OSError."""
    with open_private(path) as file:
        return file.read()


def check_owner(descriptor: int) -> None:
    """Raise PermissionError unless an open file is a regular file that only this user, or root, can write."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise PermissionError("it is not a regular file")
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"it belongs to user {status.st_uid}")
    if status.st_mode & _OTHERS_WRITE:
        raise PermissionError(f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o})")


def _walk(path: Path) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """Yield every step of a path as far as it exists, links and the folders that they lead to included.

    The last value tells whether the step is the path's own end.
    """
    waiting, here, links = list(reversed(path.parts[1:])), Path(path.anchor), 0
    yield here, os.lstat(here), not waiting
    while waiting:
        name = waiting.pop()
        if name == "..":
            here = here.parent
            continue
        step = here / name
        try:
            status = os.lstat(step)
        except FileNotFoundError:
            return
        yield step, status, not waiting
        if not stat.S_ISLNK(status.st_mode):
            here = step
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(0, "too many symbolic links")
        target = Path(os.readlink(step))
        here = Path(target.anchor) if target.is_absolute() else here
        waiting += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _exposed(step: Path, status: os.stat_result, is_last: bool) -> str | None:
    if status.st_uid not in (os.geteuid(), 0):
        return f"{step} belongs to user {status.st_uid}"
    mode = stat.S_IMODE(status.st_mode)
    is_sticky_parent = bool(mode & stat.S_ISVTX) and not is_last
    if not stat.S_ISLNK(status.st_mode) and mode & _OTHERS_WRITE and not is_sticky_parent:
        return f"others may write to {step} (mode {mode:04o}; chmod go-w {step})"
    return None
