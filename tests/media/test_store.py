"""Images by id, within a ceiling in bytes and a time to live."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from fovea.core.image import Image, content_identity
from fovea.media.store import ImageStore


def image(seed: int, side: int = 2) -> Image:
    rgb = bytes([seed]) * (side * side * 3)
    return Image(content_identity("test", side, side, rgb), side, side, rgb)


def test_the_least_recently_used_goes_first() -> None:
    store = ImageStore(24, 10, clock=lambda: 0.0)
    one, two = store.put(image(1)), store.put(image(2))
    assert one is not None
    assert two is not None
    assert store.get(one.id) is one
    three = store.put(image(3))
    assert three is not None
    assert [store.get(each.id) is not None for each in (one, two, three)] == [True, False, True]
    assert (store.bytes, store.evictions, store.misses) == (24, 1, 1)


def test_an_image_goes_after_its_time_and_stays_when_it_is_sent_again() -> None:
    now = [0.0]
    store = ImageStore(100, 10, clock=lambda: now[0])
    kept = store.put(image(1))
    assert kept is not None
    now[0] = 9
    again = store.put(image(1))
    assert again is not None
    assert again.id == kept.id
    now[0] = 18
    assert store.get(kept.id) is again
    now[0] = 19
    assert store.get(kept.id) is None
    assert (store.bytes, len(store)) == (0, 0)


def test_owners_do_not_share_ids_nor_do_stores() -> None:
    store, other = ImageStore(100, 10), ImageStore(100, 10)
    ids = {made.id for made in (store.put(image(1)), store.put(image(1), "a"), other.put(image(1))) if made}
    assert len(ids) == 3


def test_what_is_larger_than_the_store_is_not_kept() -> None:
    assert ImageStore(11, 10).put(image(1)) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.booleans()), max_size=40))
def test_bytes_are_what_is_kept_and_never_above_the_ceiling(steps: list[tuple[int, int, bool]]) -> None:
    store = ImageStore(60, 10, clock=lambda: 0.0)
    kept = set()
    for seed, side, drop in steps:
        made = store.put(image(seed, side))
        if made is not None:
            kept.add(made.id)
            if drop:
                assert store.drop(made.id)
        assert store.bytes <= 60
        assert store.bytes == sum(len(s.image.rgb) for s in map(store._images.get, kept) if s is not None)
    store.clear()
    assert (store.bytes, len(store)) == (0, 0)
