"""Tests of the disk store in one process: what is stored, for how long, and the queue of writes."""

from __future__ import annotations

import stat
import threading
import time
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


def test_an_entry_survives_a_restart(open_store: Open) -> None:
    first = open_store()
    assert arrays_of(first, "a") is None
    store_values(first, "a")
    assert arrays_of(first, "a") == value_of("a", ENTRY)
    first.close()
    second = open_store()
    stats = second.stats()
    assert (stats.entries, stats.bytes > ENTRY, stats.off) == (1, True, None)
    assert "a" in second
    assert arrays_of(second, "a") == value_of("a", ENTRY)
    assert (first.stats().hits, first.stats().misses, first.stats().writes) == (1, 1, 1)


def test_only_the_owner_can_read_the_files(open_store: Open, folder: Path) -> None:
    store_values(open_store(), "a")
    (file,) = files(folder)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, file.parent, file)]
    assert modes == [0o700, 0o700, 0o600]


def test_the_least_recently_used_entry_is_evicted_before_the_ceiling_is_exceeded(
    open_store: Open, folder: Path
) -> None:
    store = open_store(5 * ENTRY)
    store_values(store, *"abcd")
    assert arrays_of(store, "a") is not None
    store_values(store, "e")
    assert stored_keys(store, "abcde") == "acde"
    assert sum(file.stat().st_size for file in files(folder)) == store.stats().bytes <= 5 * ENTRY
    assert (store.stats().evictions, store.stats().entries) == (1, 4)


def test_a_full_folder_is_emptied_a_little_further(open_store: Open) -> None:
    """So the folder is scanned once per sixteenth of the capacity, and not at every write."""
    store = open_store(40_000)
    for i in range(200):
        store.put(str(i), value_of(str(i), 100))
    assert store.flush(10)
    assert (store.stats().drops, store.stats().writes) == (0, 200)
    before = store.stats().bytes
    store.close()
    smaller = open_store(before - 1)
    assert before - 1 - before // 16 - 1000 < smaller.stats().bytes <= before - 1 - before // 16 + 1000
    assert smaller.stats().evictions > 1


def test_no_large_entry_is_removed_to_empty_the_folder_further(open_store: Open) -> None:
    store = open_store(int(2.1 * ENTRY))
    store_values(store, *"abc")
    assert stored_keys(store, "abc") == "bc"


def test_an_entry_that_is_written_again_counts_once(open_store: Open, folder: Path) -> None:
    store = open_store()
    store_values(store, "a", size=1000)
    store_values(store, "a", size=2000)
    assert (store.stats().entries, store.stats().bytes) == (1, path_of(folder, "a").stat().st_size)


def test_an_entry_larger_than_the_cache_is_refused(open_store: Open, folder: Path) -> None:
    store = open_store(ENTRY)
    store_values(store, "a", size=ENTRY)  # the data fits, but not with its header
    store_values(store, "b", size=ENTRY + 2)
    assert (files(folder), store.stats().drops, store.stats().writes) == ([], 2, 0)


def test_age_counts_from_the_time_of_writing(open_store: Open, clock: Clock, folder: Path) -> None:
    store = open_store(ttl_s=60.0)
    store_values(store, "a", "b")
    clock.now += 50
    assert arrays_of(store, "a") is not None
    clock.now += 15
    assert "a" not in store
    assert arrays_of(store, "a") is None
    store.sweep()
    assert (files(folder), store.stats().expirations, store.stats().bytes) == ([], 2, 0)


def test_drop_and_clear(open_store: Open, folder: Path) -> None:
    store = open_store()
    store_values(store, *"abc")
    store.drop("a")
    store.drop("never there")
    assert stored_keys(store, "abc") == "bc"
    assert store.stats().entries == 2
    store.clear()
    assert (files(folder), store.stats().entries, store.stats().bytes) == ([], 0, 0)
    store_values(store, "a")
    assert arrays_of(store, "a") is not None


def test_waiting_entries_can_be_read_and_a_full_queue_drops_entries(
    open_store: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(queue_bytes=3 * ENTRY)
    go_on, write_all = threading.Event(), disk_files.write_all

    def write_slowly(descriptor: int, pieces: Sequence[memoryview]) -> None:
        assert go_on.wait(10)
        write_all(descriptor, pieces)

    monkeypatch.setattr(disk_files, "write_all", write_slowly)
    for key in "abcde":
        store.put(key, value_of(key, ENTRY))
    assert not store.flush(0.05)
    assert (store.stats().drops, store.stats().queued_bytes, stored_keys(store, "abcde")) == (
        2,
        3 * ENTRY,
        "abc",
    )
    assert all(arrays_of(store, key) == value_of(key, ENTRY) for key in "abc")
    store.drop("c")
    store.put("b", value_of("b", ENTRY))
    assert (stored_keys(store, "abcde"), store.stats().queued_bytes) == ("ab", 2 * ENTRY)
    go_on.set()
    assert store.flush(10)
    assert (stored_keys(store, "abcde"), store.stats().queued_bytes, store.stats().writes) == ("ab", 0, 2)


@pytest.mark.parametrize("call", [lambda store: store.drop("a"), lambda store: store.clear()])
def test_an_entry_can_be_dropped_while_it_is_written(
    call: Callable[[DiskStore], None], open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    started, go_on, write_all = threading.Event(), threading.Event(), disk_files.write_all

    def write_slowly(descriptor: int, pieces: Sequence[memoryview]) -> None:
        started.set()
        assert go_on.wait(10)
        write_all(descriptor, pieces)

    monkeypatch.setattr(disk_files, "write_all", write_slowly)
    store.put("a", value_of("a", ENTRY))
    assert started.wait(10)
    dropping = threading.Thread(target=call, args=(store,))
    dropping.start()
    dropping.join(0.05)
    go_on.set()
    dropping.join(10)
    assert store.flush(10)
    assert (stored_keys(store, "a"), store.stats().entries, store.stats().bytes) == ("", 0, 0)


def test_close_writes_waiting_entries_and_refuses_new_ones(open_store: Open) -> None:
    store = open_store()
    for key in "abc":
        store.put(key, value_of(key, ENTRY))
    store.close()
    store.put("d", value_of("d", ENTRY))
    assert (stored_keys(store, "abcd"), store.stats().writes, store.stats().drops) == ("abc", 3, 1)
    assert arrays_of(store, "a") == value_of("a", ENTRY)
    store.close()


def test_two_stores_on_one_folder_stay_near_the_ceiling(open_store: Open, folder: Path) -> None:
    """Each store scans the folder after a sixteenth of the capacity, even if its count says there is room."""
    one, two = open_store(), open_store()
    for store, name in ((one, "a"), (two, "b"), (one, "c")):
        store_values(store, *(f"{name}{i}" for i in range(40)), size=1000)
        assert sum(file.stat().st_size for file in files(folder)) <= CAPACITY + CAPACITY // 16
    assert one.stats().evictions > 0


def test_writes_of_another_store_are_noticed_after_a_while(
    open_store: Open, folder: Path, clock: Clock
) -> None:
    one, two = open_store(1 << 30), open_store(1 << 30)
    store_values(one, *"abc")
    store_values(two, "d")
    assert (one.stats().entries, two.stats().entries) == (3, 1)
    clock.now += 400
    store_values(two, "e")
    assert two.stats().bytes == sum(file.stat().st_size for file in files(folder))
    assert two.stats().entries == 5


def test_a_store_scans_its_folder_without_any_write(folder: Path) -> None:
    store = DiskStore(folder, CAPACITY, rescan_s=0.02)
    other = DiskStore(folder, CAPACITY)
    store_values(other, "a")
    until = time.monotonic() + 10
    while store.stats().entries == 0 and time.monotonic() < until:
        time.sleep(0.01)
    assert store.stats().entries == 1
    store.close()
    other.close()
