"""Tests of announced blocks: a router that follows them knows which prefixes an engine has."""

from __future__ import annotations

import random
from typing import Any

from fovea.engine.changes import DEVICE, HOST, BlockChanges, StoredBlock
from fovea.engine.kv.blocks import BlockPool, HostBlocks
from fovea.engine.kv.hashing import mm_hash
from fovea.engine.kv.manager import KVManager
from fovea.engine.sequence import Sequence
from tests.support.brains import sequence

SIZE = 4


class Router:
    """Applies announcements, as a router does."""

    def __init__(self, changes: BlockChanges) -> None:
        self._changes = changes
        self.blocks: dict[tuple[str, bytes], StoredBlock] = {}

    def look(self) -> None:
        net = self._changes.take()
        if net.cleared:
            self.blocks.clear()
        self.blocks |= net.stored
        for key in net.removed:
            del self.blocks[key]

    def names(self, medium: str) -> set[bytes]:
        return {name for kind, name in self.blocks if kind == medium}


def engine(blocks: int, slots: int = 0) -> tuple[KVManager, Router]:
    changes = BlockChanges()
    kv = KVManager(BlockPool(blocks), SIZE, host=HostBlocks(slots), changes=changes)
    return kv, Router(changes)


def serve(kv: KVManager, seq: Sequence) -> bool:
    """Compute a sequence to its end. Returns False if it finds no room."""
    match = kv.match(seq)
    if not kv.can_admit(seq, match):
        return False
    kv.admit(seq, match)
    kv.take_moves()
    kv.finish_moves()
    missing = seq.missing_tokens
    kv.extend(seq, seq.computed_tokens + missing)
    kv.take_moves()
    kv.finish_moves()
    kv.commit(seq, missing, seq.length)
    kv.release(seq)
    return True


def truth(kv: KVManager) -> set[bytes]:
    """The names of all full blocks in the pool."""
    names = (kv.pool.names(block)[0] for block in range(kv.pool.size))
    return {name for name in names if name is not None}


def test_announcements_name_tokens_images_and_the_block_before() -> None:
    kv, router = engine(16)
    seq = sequence("a", [1, 2, 3, ("picture", 4), 5, 6], salt="tenant")
    assert serve(kv, seq)
    router.look()
    first, second = (router.blocks[DEVICE, name] for name in seq.block_hashes)
    assert first == StoredBlock(None, (1, 2, 3, 999), ((mm_hash("picture"), 3), "tenant"))
    assert second == StoredBlock(seq.block_hashes[0], (999, 999, 999, 5), ((mm_hash("picture"), -1),))


def test_a_cleared_cache_is_told() -> None:
    kv, router = engine(16)
    serve(kv, sequence("a", 8))
    router.look()
    kv.forget_all()
    router.look()
    assert not router.blocks
    serve(kv, sequence("b", 8))
    router.look()
    assert router.names(DEVICE) == truth(kv) != set()


def test_a_router_knows_the_blocks_of_a_busy_engine_in_both_media() -> None:
    """Prompts with images come again and again, more than the pool holds, with and without host memory."""
    for slots in (0, 6):
        kv, router = engine(12, slots)
        random_ = random.Random(slots)
        seen_on_host = False
        for number in range(400):
            prompt: list[Any] = [random_.randrange(3) for _ in range(random_.randrange(1, 6))]
            prompt += [(f"image {random_.randrange(6)}", random_.randrange(3, 9))]
            prompt += [random_.randrange(3) for _ in range(random_.randrange(1, 6))]
            assert serve(kv, sequence(f"s{number}", prompt))
            if random_.random() < 0.02:
                kv.abandon_moves()
            if random_.random() < 0.01:
                kv.forget_all()
            if random_.random() < 0.5:
                router.look()
                assert router.names(DEVICE) == truth(kv)
                assert router.names(HOST) == set(kv.host._by_name)
                seen_on_host |= bool(kv.host._by_name)
            kv.check_integrity()
        assert seen_on_host == bool(slots)


def test_blocks_that_come_from_peers_are_announced() -> None:
    kv, router = engine(8)
    seq = sequence("given", 9)
    assert kv.adopt(seq, 4) is not None
    assert kv.adopt(seq, 8) is not None
    router.look()
    assert router.names(DEVICE) == set(seq.block_hashes[:2])
    assert router.blocks[DEVICE, seq.block_hashes[1]].tokens == (4, 5, 6, 7)
