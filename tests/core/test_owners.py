"""Tests of shares in a ledger: an owner over its share evicts its own entries, and never those of others."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from fovea.core.ledger import Ledger
from fovea.media.cache import ENTRY_BYTES, ByteCache
from tests.support.thorough import examples

CAPACITY = 100
SHARES = {"a": 0.3, "b": 0.5, "c": 1.0}


def ledger_of_owners(pinned: set[str] | None = None) -> Ledger[str, str]:
    ledger: Ledger[str, str] = Ledger(CAPACITY, is_pinned=(pinned or set()).__contains__)
    ledger.divide(lambda key, _: key[0], lambda owner: SHARES[owner])
    return ledger


def put(ledger: Ledger[str, str], key: str, size: int) -> None:
    if ledger.fits_share(key, key, size):
        ledger.add(key, key, size)
        ledger.evict_over_share(key)
        ledger.evict()


def test_an_owner_over_its_share_evicts_its_own_oldest_entries() -> None:
    ledger = ledger_of_owners()
    for key in ("b1", "a1", "a2", "a3"):
        put(ledger, key, 10)
    ledger.touch("a1")
    put(ledger, "a4", 10)
    assert list(ledger) == ["b1", "a3", "a1", "a4"], (
        "b1 is older than all of them, and belongs to another owner"
    )
    assert ledger.evictions == 1
    assert not ledger.fits_share("a5", "a5", 31)


def test_a_pinned_entry_stays_above_the_share_of_its_owner() -> None:
    pinned = {"a1"}
    ledger = ledger_of_owners(pinned)
    put(ledger, "a1", 25)
    put(ledger, "a2", 10)
    assert list(ledger) == ["a1"]


def test_entries_that_exist_already_get_their_owners() -> None:
    ledger: Ledger[str, str] = Ledger(CAPACITY)
    for key in ("a1", "a2", "b1"):
        ledger.add(key, key, 15)
    ledger.divide(lambda key, _: key[0], lambda owner: SHARES[owner])
    put(ledger, "a3", 15)
    assert list(ledger) == ["a2", "b1", "a3"]


ACTIONS = st.tuples(
    st.sampled_from(["put", "put", "put", "touch", "remove", "clear"]),
    st.sampled_from("abc"),
    st.integers(0, 9),
    st.integers(0, 40),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(ACTIONS, max_size=80))
def test_no_owner_exceeds_its_share_and_the_bytes_add_up(actions: list[tuple[str, str, int, int]]) -> None:
    """A client that floods a cache with a share of 0.3 leaves at least 0.7 of it to the others."""
    ledger = ledger_of_owners()
    for action, owner, number, size in actions:
        key = f"{owner}{number}"
        others = [other for other in ledger if other[0] != owner]
        if action == "put":
            fitted = ledger.bytes + size <= CAPACITY
            put(ledger, key, size)
            if fitted:
                assert [other for other in ledger if other[0] != owner] == others, "others lose nothing"
        elif action == "touch" and key in ledger:
            ledger.touch(key)
        elif action == "remove":
            ledger.remove(key)
        elif action == "clear" and number == 0:
            ledger.clear()
        ledger.check_integrity("the ledger")
        for name, share in SHARES.items():
            entries = [ledger.entry(other) for other in ledger if other[0] == name]
            assert sum(entry.size for entry in entries if entry is not None) <= share * CAPACITY


def test_a_cache_of_bytes_is_divided_among_owners() -> None:
    """In the past, one client could evict everything that others had sent ahead."""
    cache: ByteCache[str, bytes] = ByteCache(10 * (ENTRY_BYTES + 100))
    cache.divide(lambda key, _: key[0], lambda owner: SHARES[owner])
    assert cache.put("b1", b"", 100)
    for number in range(50):
        assert cache.put(f"a{number}", b"", 100)
    assert cache.find("b1") is not None
    assert len(cache) == 1 + 3
    assert not cache.put("a", b"", 4 * (ENTRY_BYTES + 100)), "larger than the owner's share"
