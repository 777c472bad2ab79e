"""The disk cache in one process: what is kept, for how long, and what waits to be written."""

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


def test_what_is_put_is_found_also_after_a_restart(opened: Open) -> None:
    first = opened()
    assert arrays_of(first, "a") is None
    store_values(first, "a")
    assert arrays_of(first, "a") == value_of("a", ENTRY)
    first.close()
    second = opened()
    stats = second.stats()
    assert (stats.entries, stats.bytes > ENTRY, stats.off) == (1, True, None)
    assert "a" in second
    assert arrays_of(second, "a") == value_of("a", ENTRY)
    assert (first.stats().hits, first.stats().misses, first.stats().writes) == (1, 1, 1)


def test_only_the_owner_may_look(opened: Open, folder: Path) -> None:
    store_values(opened(), "a")
    (file,) = files(folder)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, file.parent, file)]
    assert modes == [0o700, 0o700, 0o600]


def test_the_least_recently_used_goes_first_and_the_ceiling_is_never_passed(
    opened: Open, folder: Path
) -> None:
    store = opened(5 * ENTRY)
    store_values(store, *"abcd")
    assert arrays_of(store, "a") is not None
    store_values(store, "e")
    assert stored_keys(store, "abcde") == "acde"
    assert sum(file.stat().st_size for file in files(folder)) == store.stats().bytes <= 5 * ENTRY
    assert (store.stats().evictions, store.stats().entries) == (1, 4)


def test_a_full_cache_is_emptied_a_little_further(opened: Open) -> None:
    """So a look at the whole folder is needed once per sixteenth of the capacity, not at every write."""
    store = opened(40_000)
    for i in range(200):
        store.put(str(i), value_of(str(i), 100))
    assert store.flush(10)
    assert (store.stats().drops, store.stats().writes) == (0, 200)
    before = store.stats().bytes
    store.close()
    smaller = opened(before - 1)
    assert before - 1 - before // 16 - 1000 < smaller.stats().bytes <= before - 1 - before // 16 + 1000
    assert smaller.stats().evictions > 1


def test_being_emptied_further_costs_no_large_entry(opened: Open) -> None:
    store = opened(int(2.1 * ENTRY))
    store_values(store, *"abc")
    assert stored_keys(store, "abc") == "bc"


def test_an_entry_that_is_written_again_counts_once(opened: Open, folder: Path) -> None:
    store = opened()
    store_values(store, "a", size=1000)
    store_values(store, "a", size=2000)
    assert (store.stats().entries, store.stats().bytes) == (1, path_of(folder, "a").stat().st_size)


def test_an_entry_larger_than_the_cache_is_refused(opened: Open, folder: Path) -> None:
    store = opened(ENTRY)
    store_values(store, "a", size=ENTRY)  # the data fits, with its header it does not
    store_values(store, "b", size=ENTRY + 2)
    assert (files(folder), store.stats().drops, store.stats().writes) == ([], 2, 0)


def test_age_counts_from_the_writing(opened: Open, clock: Clock, folder: Path) -> None:
    store = opened(ttl_s=60.0)
    store_values(store, "a", "b")
    clock.now += 50
    assert arrays_of(store, "a") is not None
    clock.now += 15
    assert "a" not in store
    assert arrays_of(store, "a") is None
    store.sweep()
    assert (files(folder), store.stats().expirations, store.stats().bytes) == ([], 2, 0)


def test_drop_and_clear(opened: Open, folder: Path) -> None:
    store = opened()
    store_values(store, *"abc")
    store.drop("a")
    store.drop("never there")
    assert stored_keys(store, "abc") == "bc"
    assert store.stats().entries == 2
    store.clear()
    assert (files(folder), store.stats().entries, store.stats().bytes) == ([], 0, 0)
    store_values(store, "a")
    assert arrays_of(store, "a") is not None


def test_what_waits_is_found_and_a_full_queue_drops(
    opened: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(queue_bytes=3 * ENTRY)
    go, real = threading.Event(), disk_files.write_all

    def slowly(descriptor: int, pieces: Sequence[memoryview]) -> None:
        assert go.wait(10)
        real(descriptor, pieces)

    monkeypatch.setattr(disk_files, "write_all", slowly)
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
    go.set()
    assert store.flush(10)
    assert (stored_keys(store, "abcde"), store.stats().queued_bytes, store.stats().writes) == ("ab", 0, 2)


@pytest.mark.parametrize("call", [lambda store: store.drop("a"), lambda store: store.clear()])
def test_what_is_being_written_can_be_dropped(
    call: Callable[[DiskStore], None], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    begun, go, real = threading.Event(), threading.Event(), disk_files.write_all

    def slowly(descriptor: int, pieces: Sequence[memoryview]) -> None:
        begun.set()
        assert go.wait(10)
        real(descriptor, pieces)

    monkeypatch.setattr(disk_files, "write_all", slowly)
    store.put("a", value_of("a", ENTRY))
    assert begun.wait(10)
    dropping = threading.Thread(target=call, args=(store,))
    dropping.start()
    dropping.join(0.05)
    go.set()
    dropping.join(10)
    assert store.flush(10)
    assert (stored_keys(store, "a"), store.stats().entries, store.stats().bytes) == ("", 0, 0)


def test_close_writes_what_waits_and_takes_no_more(opened: Open) -> None:
    store = opened()
    for key in "abc":
        store.put(key, value_of(key, ENTRY))
    store.close()
    store.put("d", value_of("d", ENTRY))
    assert (stored_keys(store, "abcd"), store.stats().writes, store.stats().drops) == ("abc", 3, 1)
    assert arrays_of(store, "a") == value_of("a", ENTRY)
    store.close()


def test_two_who_do_not_know_of_each_other_stay_near_the_ceiling(opened: Open, folder: Path) -> None:
    """Each looks at the folder before it has written a sixteenth unseen, though by its own count there is room."""
    one, two = opened(), opened()
    for store, name in ((one, "a"), (two, "b"), (one, "c")):
        store_values(store, *(f"{name}{i}" for i in range(40)), size=1000)
        assert sum(file.stat().st_size for file in files(folder)) <= CAPACITY + CAPACITY // 16
    assert one.stats().evictions > 0


def test_what_others_write_is_seen_in_time(opened: Open, folder: Path, clock: Clock) -> None:
    one, two = opened(1 << 30), opened(1 << 30)
    store_values(one, *"abc")
    store_values(two, "d")
    assert (one.stats().entries, two.stats().entries) == (3, 1)
    clock.now += 400
    store_values(two, "e")
    assert two.stats().bytes == sum(file.stat().st_size for file in files(folder))
    assert two.stats().entries == 5


def test_a_store_looks_at_its_folder_also_when_nothing_is_written(folder: Path) -> None:
    store = DiskStore(folder, CAPACITY, rescan_s=0.02)
    other = DiskStore(folder, CAPACITY)
    store_values(other, "a")
    until = time.monotonic() + 10
    while store.stats().entries == 0 and time.monotonic() < until:
        time.sleep(0.01)
    assert store.stats().entries == 1
    store.close()
    other.close()
