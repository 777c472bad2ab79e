"""Tests of the disk store with threads and processes: several at once, a killed one, one without rights."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from fovea.engine.cache.disk import DiskStore
from fovea.engine.cache.disk_files import decode, path_of
from tests.support import disk_workers as workers
from tests.support.disks import arrays_of, value_of
from tests.support.thorough import is_thorough

SPAWN = multiprocessing.get_context("spawn")


def start(target: Callable[..., None], *arguments: object) -> BaseProcess:
    process = SPAWN.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def answers(target: Callable[..., None], *each: tuple[object, ...]) -> list[Any]:
    """Run `target` in one process per tuple of arguments, all at once. Returns what each process sends."""
    pipes: list[Connection] = []
    processes = []
    for arguments in each:
        mine, theirs = SPAWN.Pipe(duplex=False)
        pipes.append(mine)
        processes.append(start(target, *arguments, theirs))
        theirs.close()
    sent = [pipe.recv() if pipe.poll(60) else "silence" for pipe in pipes]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * len(processes)
    return sent


def test_several_processes_use_one_folder_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "features"
    results = answers(
        workers.hammer, *((str(folder), seed, 1.5 if is_thorough() else 0.6) for seed in range(3))
    )
    assert [(wrong, off) for wrong, _, _, off in results] == [(0, None)] * 3
    assert all(hits > 10 and writes > 10 for _, hits, writes, _ in results), results
    store = DiskStore(folder, workers.CAPACITY)
    assert store.flush(10)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert store.stats().bytes == size <= workers.CAPACITY
    assert not list(folder.rglob("*.tmp"))
    store.close()


def test_a_writer_that_is_killed_leaves_only_whole_files(tmp_path: Path) -> None:
    folder = tmp_path / "features"
    for delay in (0.0, 0.013, 0.029):
        for path in folder.glob("*/*.safetensors"):
            path.unlink()
        writer = start(workers.write_for_ever, str(folder))
        until = time.monotonic() + 60
        while len(list(folder.glob("*/*.safetensors"))) < 3 and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(delay)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(30)
        paths = set(folder.glob("*/*.safetensors"))
        assert len(paths) >= 3
        whole = 0
        for key in (f"large-{i}" for i in range(10_000)):
            path = path_of(folder, key)
            if path in paths:
                decode(bytearray(path.read_bytes()), key)
                whole += 1
            if whole == len(paths):
                break
        assert whole == len(paths)


def test_a_partial_file_of_a_killed_writer_is_never_read_and_is_removed_later(tmp_path: Path) -> None:
    folder = tmp_path / "features"
    writer = start(workers.die_half_way, str(folder))
    writer.join(60)
    assert writer.exitcode == -signal.SIGKILL
    assert len(list(folder.rglob("*.tmp"))) == 1
    store = DiskStore(folder, 1 << 30, clock=lambda: time.time() + 1000)
    assert store.flush(10)
    assert (arrays_of(store, "whole"), arrays_of(store, "half")) == (value_of("whole", workers.VALUE), None)
    assert (store.stats().entries, store.stats().corrupt, list(folder.rglob("*.tmp"))) == (1, 0, [])
    store.close()


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that all users can read and none can write.

    It is not in tmp_path, which other users cannot enter.
    """
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(folder)


def test_a_folder_without_write_permission_turns_the_store_off(readable: Path) -> None:
    ((got, contains, dropped, off),) = answers(workers.use_without_rights, (str(readable),))
    assert (got, contains, dropped, off) == (None, False, 1, "it cannot be written")
    assert list(readable.iterdir()) == []


def test_threads_share_a_store(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "features", workers.CAPACITY)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for i in range(300):
            key = workers.KEYS[(i * 7 + seed * 5) % len(workers.KEYS)]
            got = arrays_of(store, key)
            if got is None:
                store.put(key, value_of(key, workers.VALUE))
            elif got != value_of(key, workers.VALUE):
                wrong.append(key)
            if i % 20 == seed:
                store.drop(key)
            if i % 100 == 99:
                (store.clear, store.sweep, store.flush)[seed % 3]()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert store.flush(10)
    assert (wrong, store.stats().off, store.stats().corrupt, store.stats().drops) == ([], None, 0, 0)
    store.sweep()
    assert store.stats().bytes <= workers.CAPACITY
    store.close()
