"""Tests of the pool of KV blocks, also against a naive model of it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fovea.engine.kv.blocks import BlockPool
from tests.support.thorough import examples


def test_a_new_pool_hands_out_every_block_once() -> None:
    pool = BlockPool(4)
    assert sorted(pool.take() for _ in range(4)) == [0, 1, 2, 3]
    assert (pool.free, pool.used, pool.cached) == (0, 4, 0)
    with pytest.raises(KeyError):
        pool.take()


def test_a_named_block_is_found_after_its_release() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.publish(block, b"a")
    pool.release(block)
    assert pool.find(b"a") == block
    assert pool.is_free(block)
    pool.share(block)
    assert not pool.is_free(block)
    assert pool.used == 1


def test_taking_a_block_forgets_its_name() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.publish(block, b"a")
    pool.release(block)
    assert pool.take() == block
    assert pool.find(b"a") is None
    assert (pool.cached, pool.evictions) == (0, 1)
    pool.release(block)
    pool.take()
    assert pool.evictions == 1


def test_blank_blocks_go_before_cached_ones_and_the_oldest_name_first() -> None:
    pool = BlockPool(4)
    first, second, third, blank = (pool.take() for _ in range(4))
    for block, name in ((first, b"1"), (second, b"2"), (third, b"3")):
        pool.publish(block, name)
    for block in (second, first, third, blank):
        pool.release(block)
    assert [pool.take() for _ in range(4)] == [blank, second, first, third]


def test_using_a_block_again_makes_it_the_most_recent() -> None:
    pool = BlockPool(2)
    old, new = pool.take(), pool.take()
    pool.publish(old, b"old")
    pool.publish(new, b"new")
    pool.release(old)
    pool.release(new)
    pool.share(old)
    pool.release(old)
    assert pool.take() == new


def test_a_name_stays_with_the_first_block_that_got_it() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    pool.publish(first, b"x")
    pool.publish(second, b"x")
    assert pool.find(b"x") == first
    pool.release(second)
    assert pool.take() == second, "the second block has no name, so it is blank and taken first"


def test_releasing_a_block_that_no_table_holds_is_an_error() -> None:
    pool = BlockPool(1)
    pool.release(pool.take())
    with pytest.raises(RuntimeError, match="no block table holds it"):
        pool.release(0)


def test_forgetting_all_names_keeps_the_blocks_in_use() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.publish(block, b"a")
    assert pool.forget_all() == 1
    assert (pool.used, pool.cached) == (1, 0)
    pool.release(block)
    assert pool.find(b"a") is None


def test_the_integrity_check_finds_a_leak_and_a_block_in_two_tables() -> None:
    pool = BlockPool(3)
    block = pool.take()
    pool.check_integrity([[block]])
    with pytest.raises(RuntimeError, match="wrong reference count"):
        pool.check_integrity([])
    with pytest.raises(RuntimeError, match="wrong reference count"):
        pool.check_integrity([[block], [block]])


class PoolMachine(RuleBasedStateMachine):
    """Compare the pool with a naive model: a list of counts, a dict of names, a list as free queue."""

    @initialize(size=st.integers(1, 6))
    def start(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.refs = [0] * size
        self.names: dict[int, bytes] = {}
        self.queue = list(range(size))

    @precondition(lambda self: self.queue)
    @rule()
    def take(self) -> None:
        block = self.pool.take()
        assert block == self.queue.pop(0)
        self.names.pop(block, None)
        self.refs[block] = 1

    @precondition(lambda self: any(self.refs))
    @rule(data=st.data(), letter=st.sampled_from("abcdef"))
    def publish(self, data: st.DataObject, letter: str) -> None:
        block = data.draw(st.sampled_from([b for b, n in enumerate(self.refs) if n]))
        name = letter.encode()
        self.pool.publish(block, name)
        if block not in self.names and name not in self.names.values():
            self.names[block] = name

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.names.values())))
        block = self.pool.find(name)
        assert block is not None
        assert self.names[block] == name
        self.pool.share(block)
        if self.refs[block] == 0:
            self.queue.remove(block)
        self.refs[block] += 1

    @precondition(lambda self: any(self.refs))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b, n in enumerate(self.refs) if n]))
        self.pool.release(block)
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.queue.insert(len(self.queue) if block in self.names else 0, block)

    @rule()
    def forget(self) -> None:
        assert self.pool.forget_all() == len(self.names)
        self.names.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity([[b] * n for b, n in enumerate(self.refs)])
        assert self.pool.free == len(self.queue)
        assert self.pool.used == sum(n > 0 for n in self.refs)
        assert self.pool.cached == len(self.names)
        for letter in "abcdef":
            held = [b for b, name in self.names.items() if name == letter.encode()]
            assert self.pool.find(letter.encode()) == (held[0] if held else None)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
