"""Shares of clients in the engine's caches of images: a greedy client evicts its own entries only."""

from __future__ import annotations

import numpy as np

from fovea.engine.cache.embeddings import CacheShares, EmbeddingCache, owner_of_key
from fovea.engine.cache.host import HostStore
from fovea.engine.request.pixels import PixelPool
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan

PLAN = VisualPlan(1, 1, 1, (1, 2, 2), "@", "plan")


def key(client: str, name: str) -> str:
    return f"{client}:salt\x00{name}\x00plan"


def test_the_owner_of_a_key() -> None:
    assert owner_of_key(key("alice", "cat")) == "alice"
    assert owner_of_key("\x00cat\x00plan") == ""


def test_a_share_is_that_of_the_latest_request() -> None:
    shares = CacheShares()
    shares.note("alice:x", 0.25)
    assert (shares.share_of("alice"), shares.share_of("bob")) == (0.25, 1.0)
    shares.note("alice:y", 1.0)
    assert shares.share_of("alice") == 1.0


def test_a_flood_of_one_clients_images_leaves_the_others_alone() -> None:
    """With one pool for all, a client that sends new images all the time evicts every image of the others."""
    shares = CacheShares()
    shares.note("flood:", 0.5)
    cache: EmbeddingCache[str] = EmbeddingCache(100)
    cache.divide(owner_of_key, shares.share_of)
    for number in range(4):
        cache.put(key("calm", str(number)), "output", 10, set())
    for number in range(50):
        cache.put(key("flood", str(number)), "output", 10, set())
    assert sum(name.startswith("calm") for name in cache.keys) == 4
    assert [name for name in cache.keys if name.startswith("flood")] == [
        key("flood", str(number)) for number in range(45, 50)
    ]
    cache.check_integrity(set())


def test_outputs_that_a_step_reads_may_exceed_the_share_until_they_are_released() -> None:
    shares = CacheShares()
    shares.note("flood:", 0.1)
    cache: EmbeddingCache[str] = EmbeddingCache(100)
    cache.divide(owner_of_key, shares.share_of)
    for number in range(3):
        cache.put(key("flood", str(number)), "output", 10, {"a"})
    assert len(cache) == 3
    for number in range(3):
        cache.release(key("flood", str(number)), "a")
    assert cache.keys == [key("flood", "2")]
    cache.check_integrity(set())


def test_host_memory_and_pixels_have_shares_too() -> None:
    shares = CacheShares()
    shares.note("flood:", 0.5)
    host: HostStore[str] = HostStore(100)
    host.divide(owner_of_key, shares.share_of)
    pool = PixelPool(1000, cache_capacity=100)
    pool.divide(owner_of_key, shares.share_of)
    pixels = ProcessedImage("x", PLAN, {"pixel_values": np.zeros(10, np.uint8)})
    for client, count in (("calm", 3), ("flood", 20)):
        for number in range(count):
            host.put(key(client, str(number)), 10, 0.0, lambda: "output")
            pool.keep(key(client, str(number)), pixels)
    assert [number for number in range(20) if key("flood", str(number)) in host] == list(range(15, 20))
    assert all(key("calm", str(number)) in host for number in range(3))
    assert pool.stats().bytes == 80
    assert pool.take(key("calm", "0")) is not None
    assert pool.take(key("flood", "0")) is None
