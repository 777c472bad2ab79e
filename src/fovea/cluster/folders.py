"""A folder on a disk, in the form in which batches use folders (`fovea.cluster.batch.Folder`)."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from fovea.cluster.batch import Writer

UNFINISHED = ".new"
"""Ending of hidden files that are being written. A crash may leave one, which no reader takes for a file."""


class LocalFolder:
    """A folder of this machine, or one that all machines mount."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        # Not by pathlib, which interns each part of a name: memory grew by 25 bytes per image.
        with open(os.path.join(self._path, name), "rb") as file:
            if start:
                file.seek(start)
            return file.read() if length is None else file.read(length)

    def write(self, name: str, data: bytes) -> None:
        """Replace a file. Its bytes are on the disk before its name: a power failure leaves no half."""
        target = self._path / name
        aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}{UNFINISHED}")
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def create(self, name: str) -> AbstractContextManager[Writer]:
        self._path.mkdir(parents=True, exist_ok=True)
        return (self._path / name).open("wb", buffering=2**20)

    def names(self) -> set[str]:
        with os.scandir(self._path) as entries:
            return {entry.name for entry in entries if entry.is_file()}

    def walk(self, endings: Sequence[str]) -> Iterator[str]:
        """Yield names as the system lists them. Only folders that wait to be listed are in memory."""
        ends, folders = tuple(endings), [""]
        while folders:
            folder = folders.pop()
            with os.scandir(self._path / folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(name)
                    elif entry.name.lower().endswith(ends) and entry.is_file():
                        yield name
