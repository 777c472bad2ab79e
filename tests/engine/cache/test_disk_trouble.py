"""Tests of damaged files, foreign files and broken disks: misses and warnings, but no exceptions."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fovea.engine.cache import disk_files
from fovea.engine.cache.disk import DiskStore
from fovea.engine.cache.disk_files import path_of
from tests.support.disks import (
    CAPACITY,
    ENTRY,
    Clock,
    Open,
    arrays_of,
    files,
    store_values,
    stored_keys,
    value_of,
)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut off": lambda file: os.truncate(file, 5000),
    "empty": lambda file: os.truncate(file, 0),
    "longer": lambda file: os.truncate(file, ENTRY + 3000),
    "one bit": lambda file: file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])),
    "zeros": lambda file: file.write_bytes(bytes(ENTRY)),
    "not ours": lambda file: file.write_bytes(b"\x02\0\0\0\0\0\0\0{}"),
    "huge": lambda file: os.truncate(file, CAPACITY + 1),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_a_miss_with_one_warning(
    kind: str, open_store: Open, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    store_values(store, "a", "b")
    file = path_of(folder, "a")
    DAMAGE[kind](file)
    assert [arrays_of(store, "a"), arrays_of(store, "a")] == [None, None]
    assert (len(warnings(caplog)), str(file) in warnings(caplog)[0], file.exists()) == (1, True, False)
    assert (store.stats().corrupt, store.stats().entries, store.stats().off) == (1, 1, None)
    store_values(store, "a")
    assert arrays_of(store, "a") == value_of("a", ENTRY)


def test_a_file_of_another_key_or_version_is_a_miss(
    open_store: Open, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store_values(store, "a")
    path_of(folder, "b").parent.mkdir(exist_ok=True)
    shutil.copy(path_of(folder, "a"), path_of(folder, "b"))
    assert arrays_of(store, "b") is None
    file = path_of(folder, "a")
    monkeypatch.setattr("fovea.engine.cache.disk_files.VERSION", "2")
    path_of(folder, "a").parent.mkdir(exist_ok=True)
    shutil.copy(file, path_of(folder, "a"))
    assert arrays_of(store, "a") is None
    assert ["another key" in warnings(caplog)[0], "version" in warnings(caplog)[1]] == [True, True]


def test_a_damaged_file_that_cannot_be_removed_is_reported_once(
    open_store: Open, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store_values(store, "a", "b")
    os.truncate(path_of(folder, "a"), 10)

    def refuse(path: object) -> None:
        raise PermissionError(errno.EPERM, "not yours")

    monkeypatch.setattr(os, "unlink", refuse)
    assert [arrays_of(store, "a"), arrays_of(store, "a")] == [None, None]
    assert (len(warnings(caplog)), arrays_of(store, "b") is not None) == (1, True)


def test_foreign_files_are_left_alone(
    open_store: Open, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    name = path_of(folder, "a").name
    shard = path_of(folder, "a").parent
    foreign = [folder / "notes.txt", shard / "model.safetensors", folder / "zz" / name, folder / name]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(CAPACITY))
    target = folder / "notes.txt"
    link, pipe, inside = (path_of(folder, key) for key in ("linked", "piped", "folder"))
    for path in (link, pipe, inside):
        path.parent.mkdir(exist_ok=True)
    link.symlink_to(target)
    os.mkfifo(pipe)
    inside.mkdir()
    store = open_store()
    assert store.stats().bytes == 0
    for key in ("linked", "piped", "folder"):
        assert [arrays_of(store, key), key in store] == [None, False]
        store_values(store, key)
        assert arrays_of(store, key) is None
    store_values(store, "a")
    assert arrays_of(store, "a") is not None
    assert len(warnings(caplog)) == 3
    store.clear()
    assert all(path.stat().st_size == CAPACITY for path in foreign)
    assert (link.is_symlink(), pipe.is_fifo(), inside.is_dir()) == (True, True, True)


def test_foreign_files_at_the_paths_of_sub_folders(open_store: Open, folder: Path, tmp_path: Path) -> None:
    store = open_store()
    (tmp_path / "elsewhere").mkdir()
    path_of(folder, "a").parent.symlink_to(tmp_path / "elsewhere")
    path_of(folder, "b").parent.write_text("a file")
    store_values(store, *"abc")
    assert stored_keys(store, "abc") == "c"
    assert (files(tmp_path / "elsewhere"), store.stats().off, store.stats().drops) == ([], None, 2)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_full_or_broken_disk_turns_the_store_off_once(
    code: int,
    open_store: Open,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store()
    store_values(store, "a")

    def fail(descriptor: int, pieces: Sequence[memoryview]) -> None:
        os.write(descriptor, pieces[0])
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(disk_files, "write_all", fail)
        store_values(store, "b", "c")
    assert files(folder) == [path_of(folder, "a")], "a part of a file was left behind"
    assert (arrays_of(store, "a"), "a" in store, store.stats().drops) == (None, False, 2)
    assert (len(warnings(caplog)), str(folder) in warnings(caplog)[0]) == (1, True)
    assert os.strerror(code) in str(store.stats().off)
    store.sweep()
    store.clear()
    store_values(store, "a")
    assert (arrays_of(store, "a"), store.stats().off) == (value_of("a", ENTRY), None)


def test_an_error_that_passes_fails_one_write(
    open_store: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()

    def fail(descriptor: int, pieces: Sequence[memoryview]) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(disk_files, "write_all", fail)
        store_values(store, "a", "b")
    store_values(store, "c")
    assert (stored_keys(store, "abc"), store.stats().drops, len(warnings(caplog))) == ("c", 2, 1)


def test_a_folder_that_is_removed(open_store: Open, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader, writer, sweeper = open_store(), open_store(), open_store()
    store_values(writer, "a")
    shutil.rmtree(folder)
    assert [arrays_of(reader, "a"), arrays_of(reader, "a")] == [None, None]
    store_values(writer, "b", "c")
    sweeper.sweep()
    assert all(store.stats().off for store in (reader, writer, sweeper))
    assert (len(warnings(caplog)), folder.exists()) == (3, False)


def test_a_folder_that_is_emptied_stays_in_use(
    open_store: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    store_values(store, "a")
    write_all = disk_files.write_all
    emptied: list[int] = []

    def empty_once(descriptor: int, pieces: Sequence[memoryview]) -> None:
        if not emptied:
            emptied.append(1)
            for path in folder.iterdir():
                shutil.rmtree(path)
        write_all(descriptor, pieces)

    monkeypatch.setattr(disk_files, "write_all", empty_once)
    store_values(store, "b")
    assert (stored_keys(store, "ab"), store.stats().off) == ("b", None)


@pytest.mark.parametrize("where", ["file", "below a file"])
def test_a_folder_that_cannot_be_created(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" if where == "file" else tmp_path / "file" / "below"
    store = DiskStore(path, CAPACITY)
    store_values(store, "a")
    store.drop("a")
    assert (arrays_of(store, "a"), store.stats().drops, len(warnings(caplog))) == (None, 1, 1)
    store.clear()
    store.close()


def test_abandoned_temporary_files_are_removed_after_a_while(
    open_store: Open, folder: Path, clock: Clock
) -> None:
    store_values(open_store(), "a")
    file = path_of(folder, "a")
    part = file.parent / f".{file.name.split('.')[0]}.0123456789abcdef.tmp"
    part.write_bytes(bytes(1000))
    os.utime(part, (clock.now, clock.now))
    store = open_store()
    assert (part.exists(), store.stats().entries) == (True, 1)
    assert store.stats().bytes == file.stat().st_size + 1000
    clock.now += 700
    store.sweep()
    assert (part.exists(), store.stats().bytes) == (False, file.stat().st_size)
    assert store.stats().expirations == 0


def test_a_defect_fails_one_write_and_not_the_thread(
    open_store: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()

    def broken(descriptor: int, pieces: Sequence[memoryview]) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(disk_files, "write_all", broken)
        store_values(store, "a")
    store_values(store, "b")
    assert (stored_keys(store, "ab"), len(warnings(caplog))) == ("b", 1)
