"""Helpers for tests of the disk cache: a clock, values computed from keys, a list of files.

The module imports little, because processes that tests spawn import it, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from fovea.engine.cache.disk import DiskStore
from fovea.engine.cache.disk_files import Array, Arrays

CAPACITY = 100_000
ENTRY = 10_000
Open = Callable[..., DiskStore]


class Clock:
    """A clock that tests set. Each reading advances it by a millisecond."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        self.now += 0.001  # so that no two events have the same time
        return self.now


def value_of(key: str, size: int) -> Arrays:
    """The value of a key, `size` bytes computed from the key, so that every process gets the same."""
    return Arrays((Array("embeds", "bfloat16", (size // 2,), hashlib.shake_128(key.encode()).digest(size)),))


def store_values(store: DiskStore, *keys: str, size: int = ENTRY) -> None:
    for key in keys:
        store.put(key, value_of(key, size))
        assert store.flush(10)


def stored_keys(store: DiskStore, keys: str) -> str:
    return "".join(key for key in keys if key in store)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def arrays_of(store: DiskStore, key: str) -> Arrays | None:
    """The arrays of an entry, without the time at which it was written."""
    entry = store.read(key)
    return None if entry is None else entry.arrays
