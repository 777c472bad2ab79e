"""The store of uploaded images: ceiling in bytes, time to live, and separation of tenants."""

from __future__ import annotations

from fovea.core.media import Image, content_identity
from fovea.media.cache import ENTRY_BYTES, ImageStore

ONE = 12 + ENTRY_BYTES


def image(seed: int, side: int = 2) -> Image:
    rgb = bytes([seed]) * (side * side * 3)
    return Image(content_identity("test", side, side, rgb), side, side, rgb)


def test_the_least_recently_used_image_is_evicted() -> None:
    store = ImageStore(2 * ONE, 10, clock=lambda: 0.0)
    one, two = store.put(image(1)), store.put(image(2))
    assert one is not None
    assert two is not None
    assert store.get(one.id) is one
    three = store.put(image(3))
    assert three is not None
    assert [store.get(each.id) is not None for each in (one, two, three)] == [True, False, True]
    assert store.stats() == {
        "image_store_bytes": 2 * ONE,
        "image_store_capacity_bytes": 2 * ONE,
        "image_store_entries": 2,
        "image_store_hits": 3,
        "image_store_misses": 1,
        "image_store_evictions": 1,
        "image_store_expired": 0,
    }


def test_a_repeated_upload_renews_the_time_to_live() -> None:
    now = [0.0]
    store = ImageStore(10 * ONE, 10, clock=lambda: now[0])
    first = store.put(image(1))
    assert first is not None
    now[0] = 9
    again = store.put(image(1))
    assert again is not None
    assert (again.id, again.expires) == (first.id, 19)
    now[0] = 18
    assert store.get(first.id) is again
    now[0] = 19
    assert store.get(first.id) is None
    assert (store.cache.bytes, len(store), store.cache.expirations) == (0, 0, 1)


def test_salts_tenants_and_stores_do_not_share_ids() -> None:
    store, other = ImageStore(10 * ONE, 10), ImageStore(10 * ONE, 10)
    owners = [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("b", "ca"), ("1:a", ""), ("", "1:a")]
    entries = [store.put(image(1), salt, tenant) for salt, tenant in owners] + [other.put(image(1))]
    assert len({entry.id for entry in entries if entry}) == len(owners) + 1


def test_an_id_is_valid_for_its_tenant_only() -> None:
    store = ImageStore(10 * ONE, 10)
    mine = store.put(image(1), "salt", "me")
    assert mine is not None
    assert store.get(mine.id, "me") is mine
    assert store.get(mine.id, "you") is None
    assert store.get(mine.id) is None
    assert (store.cache.hits, store.cache.misses) == (1, 2)


def test_an_image_larger_than_the_store_is_not_stored() -> None:
    assert ImageStore(ONE - 1, 10).put(image(1)) is None
    assert ImageStore(ONE, 10).put(image(1)) is not None
