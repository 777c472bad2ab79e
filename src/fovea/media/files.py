"""Reads a regular file beneath one folder, safe against symbolic links and against races that add them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fovea.core.errors import Forbidden
from fovea.media.kind import IMAGE, Kind
from fovea.media.limits import MediaLimits
from fovea.media.text import quote

_STEP = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
# O_NONBLOCK: opening a FIFO must not wait for a writer.
_LEAF = _STEP | os.O_NONBLOCK
_PART = 1 << 20


def read_beneath(path: Path, limits: MediaLimits, kind: Kind = IMAGE) -> bytes:
    """Read a file that lies beneath limits.file_root after its links are resolved.

    Raises Forbidden for a path outside, whether or not it exists, so that the answer does not reveal which.
    Raises InvalidMedia of the kind if the file cannot be read or is too large.
    """
    if limits.file_root is None:
        raise Forbidden("file:// URLs are not accepted here", code="url_not_allowed")
    outside = Forbidden(
        f"the file:// URL leaves the folder that {kind.noun}s are read from", code="url_not_allowed"
    )
    try:
        root = limits.file_root.resolve(strict=True)
        inner = path.resolve().relative_to(root)
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name too long, or not beneath the root
        raise outside from None
    name = quote(str(inner))
    try:
        leaf = _open_beneath(root, inner.parts)
        try:
            return _read(leaf, name, limits, kind)
        finally:
            os.close(leaf)
    except OSError as error:
        raise kind.invalid(
            f"the file {name} cannot be read: {error.strerror}", "{noun}_fetch_failed"
        ) from None


def _open_beneath(root: Path, parts: tuple[str, ...]) -> int:
    """Open the path part by part without following links. A link created after `resolve` fails here."""
    at = os.open(root, _STEP | os.O_DIRECTORY)
    for depth, part in enumerate(parts, 1):
        try:
            inner = os.open(part, _LEAF if depth == len(parts) else _STEP | os.O_DIRECTORY, dir_fd=at)
        finally:
            os.close(at)
        at = inner
    return at


def _read(leaf: int, name: str, limits: MediaLimits, kind: Kind) -> bytes:
    most = kind.max_bytes(limits)
    status = os.fstat(leaf)
    if not stat.S_ISREG(status.st_mode):
        raise Forbidden(f"the file {name} is not a regular file", code="url_not_allowed")
    data = bytearray()
    size = status.st_size
    # The file may grow after fstat, and files of the system (/proc) state no size.
    while size <= most and (part := os.read(leaf, _PART)):
        data += part
        size = max(size, len(data))
    if size > most:
        raise kind.invalid(
            f"the file {name} holds {size} bytes; accepted: at most {most}", "{noun}_too_large"
        )
    return bytes(data)
