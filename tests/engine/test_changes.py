"""Tests of net changes: whoever applies them knows the cache, whenever they are taken."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
from hypothesis import given

from fovea.engine.changes import DEVICE, Changes, Net, OutputChanges, StoredOutput, watch_outputs

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["store", "remove"]), st.integers(0, 5)),
        st.tuples(st.sampled_from(["clear", "take"]), st.just(0)),
    ),
    max_size=60,
)


def apply(net: Net[int, int], known: dict[int, int]) -> None:
    if net.cleared:
        known.clear()
    for key, value in net.stored.items():
        assert key not in known, "a subscriber is told twice that an entry came"
        known[key] = value
    for key in net.removed:
        del known[key]


@given(OPERATIONS)
def test_net_changes_describe_the_cache_and_are_never_more_than_its_entries(
    operations: list[tuple[str, int]],
) -> None:
    changes: Changes[int, int] = Changes()
    cache: dict[int, int] = {}
    known: dict[int, int] = {}
    for number, (what, key) in enumerate(operations):
        if what == "store" and key not in cache:
            cache[key] = number
            changes.store([(key, number)])
        elif what == "remove" and key in cache:
            del cache[key]
            changes.remove(key)
        elif what == "clear":
            cache.clear()
            changes.clear()
        elif what == "take":
            before = len(known)
            net = changes.take()
            assert len(net.stored) + len(net.removed) <= before + len(cache)
            apply(net, known)
            assert known.keys() == cache.keys()
    apply(changes.take(), known)
    assert known.keys() == cache.keys()
    assert not changes.take()


def test_what_comes_and_goes_between_two_looks_is_not_told() -> None:
    changes: Changes[str, int] = Changes()
    changes.store([("passing", 1)])
    changes.remove("passing")
    assert changes.take() == Net(False, {}, [])
    changes.store([("lasting", 2)])
    changes.take()
    changes.remove("lasting")
    changes.store([("lasting", 2)])
    assert not changes.take()


def test_unknown_removals_and_repeated_stores_do_not_count() -> None:
    changes: Changes[str, int] = Changes()
    changes.remove("never there")
    changes.store([("a", 1)])
    changes.store([("a", 2)])
    assert changes.take() == Net(False, {"a": 1}, [])


def test_only_the_first_change_wakes_who_takes_them() -> None:
    woken: list[int] = []
    changes: Changes[int, int] = Changes(lambda: woken.append(1))
    changes.store([(1, 1)])
    changes.store([(2, 1)])
    changes.remove(1)
    assert len(woken) == 1
    changes.take()
    changes.clear()
    changes.store([(3, 1)])
    assert len(woken) == 2


def test_threads_lose_nothing() -> None:
    changes: Changes[tuple[int, int], int] = Changes()

    def work(thread: int) -> None:
        for number in range(500):
            changes.store([((thread, number), number)])
            if number % 2:
                changes.remove((thread, number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    known: dict[tuple[int, int], int] = {}
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        net = changes.take()
        known |= net.stored
        for key in net.removed:
            del known[key]
    net = changes.take()
    known |= net.stored
    for key in net.removed:
        del known[key]
    assert known.keys() == {(thread, number) for thread in range(4) for number in range(0, 500, 2)}


def test_a_cache_of_outputs_notes_sizes_and_a_cache_without_listeners_nothing() -> None:
    changes = OutputChanges()
    watch = watch_outputs(changes, DEVICE)
    assert watch is not None
    watch("key", 40)
    assert changes.take().stored == {(DEVICE, "key"): StoredOutput(40)}
    watch("key", None)
    assert changes.take().removed == [(DEVICE, "key")]
    assert watch_outputs(None, DEVICE) is None
