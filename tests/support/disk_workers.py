"""Functions that tests of the disk cache run in other processes.

The module imports little, so that a spawned process starts quickly.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from fovea.engine.cache import disk_files
from fovea.engine.cache.disk import DiskStore
from tests.support.disks import arrays_of, value_of

VALUE = 18_000
CAPACITY = 8 * (VALUE + 2000)
KEYS = [f"picture-{i}" for i in range(24)]


def hammer(folder: str, seed: int, seconds: float, answer: Connection) -> None:
    """Get, put, drop and damage entries at random; send (wrong values, hits, writes, why it is off)."""
    random_ = random.Random(seed)
    store = DiskStore(folder, CAPACITY)
    wrong = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        key = random_.choice(KEYS)
        value = arrays_of(store, key)
        if value is None:
            store.put(key, value_of(key, VALUE))
        elif value != value_of(key, VALUE):
            wrong += 1
        if random_.random() < 0.05:
            store.drop(random_.choice(KEYS))
        if random_.random() < 0.05:
            damage(disk_files.path_of(Path(folder), random_.choice(KEYS)), random_)
    store.close()
    stats = store.stats()
    answer.send((wrong, stats.hits, stats.writes, stats.off))


def damage(path: Path, random_: random.Random) -> None:
    try:
        size = path.stat().st_size
        if random_.random() < 0.5:
            os.truncate(path, random_.randrange(size))
        else:
            with open(path, "r+b") as file:
                file.seek(random_.randrange(size))
                file.write(b"\xa5")
    except (FileNotFoundError, ValueError):
        pass  # another process removed the file first


def write_for_ever(folder: str) -> None:
    store = DiskStore(folder, 1 << 30)
    for i in range(10_000):
        store.put(f"large-{i}", value_of(f"large-{i}", 1 << 20))
        store.flush()


def die_half_way(folder: str) -> None:
    """Write one whole entry, then kill this process when half of a second entry is on disk."""
    store = DiskStore(folder, 1 << 30)
    store.put("whole", value_of("whole", VALUE))
    store.flush()

    def half(descriptor: int, pieces: Sequence[memoryview]) -> None:
        os.write(descriptor, pieces[0])
        os.write(descriptor, pieces[1][: len(pieces[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    disk_files.write_all = half
    store.put("half", value_of("half", VALUE))
    store.flush()


def use_without_rights(folder: str, answer: Connection) -> None:
    """Use a folder that this process may only read; send (get, contains, dropped, why the store is off)."""
    if os.geteuid() == 0:
        os.setuid(65534)
    store = DiskStore(folder, 1 << 20)
    store.put("key", value_of("key", VALUE))
    store.flush()
    stats = store.stats()
    answer.send((arrays_of(store, "key"), "key" in store, stats.drops, stats.off))
