"""Tests of block tables: cached prefixes, expected blocks, and released blocks."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fovea.engine.kv.blocks import BlockPool
from fovea.engine.kv.manager import KVManager, PrefixMatch
from fovea.engine.sequence import Sequence
from tests.support.brains import sequence
from tests.support.thorough import examples

NOTHING = PrefixMatch(())


def manager(blocks: int = 16, *, share: bool = True) -> KVManager:
    return KVManager(BlockPool(blocks), 4, share_prefixes=share)


def admit(kv: KVManager, seq: Sequence) -> PrefixMatch:
    match = kv.match(seq)
    kv.admit(seq, match)
    return match


def compute(kv: KVManager, seq: Sequence, count: int | None = None) -> None:
    count = seq.missing_tokens if count is None else count
    kv.extend(seq, seq.computed_tokens + count)
    kv.commit(seq, count, seq.length)


def test_a_prompt_is_found_again_up_to_its_last_token() -> None:
    """One token must be computed to get logits, so the last of the whole blocks is not matched."""
    kv = manager()
    first = sequence("first", 8)
    assert admit(kv, first) == NOTHING
    compute(kv, first)
    again = sequence("again", 8)
    assert kv.match(again).blocks == tuple(first.blocks[:1])
    longer = sequence("longer", 9)
    assert admit(kv, longer).blocks == tuple(first.blocks)
    assert (longer.computed_tokens, longer.cached_tokens) == (8, 8)


def test_a_finished_answer_is_a_prefix_too() -> None:
    kv = manager()
    turn = sequence("turn", 6)
    admit(kv, turn)
    compute(kv, turn)
    turn.append([50, 51, 52])
    compute(kv, turn)
    kv.release(turn)
    follow_up = sequence("next", [*range(6), 50, 51, 9, 9])
    assert len(kv.match(follow_up).blocks) == 2


def test_different_salts_or_images_share_no_prefix_and_sharing_can_be_turned_off() -> None:
    kv = manager()
    one = sequence("one", [1, ("cat", 6), 2, 3])
    admit(kv, one)
    compute(kv, one)
    assert kv.match(sequence("same", [1, ("cat", 6), 2, 3])).blocks
    assert not kv.match(sequence("dog", [1, ("dog", 6), 2, 3])).blocks
    assert not kv.match(sequence("salt", [1, ("cat", 6), 2, 3], salt="tenant")).blocks
    off = manager(share=False)
    admit(off, one2 := sequence("one", 9))
    compute(off, one2)
    assert off.match(sequence("again", 9)) == NOTHING
    assert off.pool.cached == 0


def test_blocks_of_a_prefix_are_expected_until_they_are_computed() -> None:
    kv = manager()
    first, second = sequence("first", 9), sequence("second", 9)
    admit(kv, first)
    assert kv.match(second) == PrefixMatch((), "first")
    compute(kv, first, 4)
    assert kv.match(second) == PrefixMatch(tuple(first.blocks), "first")
    compute(kv, first, 4)
    assert kv.match(second) == PrefixMatch(tuple(first.blocks))


def test_nothing_is_expected_from_a_sequence_that_has_ended() -> None:
    kv = manager()
    first = sequence("first", 9)
    admit(kv, first)
    compute(kv, first, 4)
    kv.release(first)
    match = kv.match(sequence("second", 9))
    assert match.pending is None
    assert len(match.blocks) == 1
    kv.check_integrity()


def test_admission_counts_the_cached_blocks_that_it_locks() -> None:
    """A cached block is free until it is matched. It must not count both as a hit and as free room."""
    kv = manager(blocks=3)
    first = sequence("first", 8)
    admit(kv, first)
    compute(kv, first)
    kv.release(first)
    again = sequence("again", 12)
    match = kv.match(again)
    assert len(match.blocks) == 2
    assert kv.can_admit(again, match)
    assert not kv.can_admit(sequence("longer", 13), match)


def test_blank_blocks_are_taken_before_a_cached_prefix() -> None:
    kv = manager(blocks=3)
    first = sequence("first", 5)
    admit(kv, first)
    compute(kv, first)
    kv.release(first)
    other = sequence("other", [7] * 8)
    admit(kv, other)
    compute(kv, other)
    kv.check_integrity()
    assert len(kv.match(sequence("again", 5)).blocks) == 1, "two blank blocks could be taken first"


def test_later_blocks_are_evicted_before_the_ones_they_build_on() -> None:
    kv = manager(blocks=4)
    first = sequence("first", 12)
    admit(kv, first)
    compute(kv, first)
    kv.release(first)
    admit(kv, other := sequence("other", [7] * 8))
    compute(kv, other)
    assert len(kv.match(sequence("again", 12)).blocks) == 2


def test_the_integrity_check_finds_a_block_expected_from_a_sequence_that_has_ended() -> None:
    kv = manager()
    kv._pending[b"x"] = "gone"
    with pytest.raises(RuntimeError, match="expected from sequences that have ended"):
        kv.check_integrity()


@pytest.mark.parametrize(("arrival", "blocks"), [(19.9, 1), (20.0, 0), (25.0, 0)])
def test_a_prefix_is_reused_only_in_its_own_generation(arrival: float, blocks: int) -> None:
    kv = KVManager(BlockPool(8), 4, ttl_s=10)
    admit(kv, first := sequence("first", 5, arrival=10.0))
    compute(kv, first)
    assert len(kv.match(sequence("again", 5, arrival=arrival)).blocks) == blocks


class ManagerMachine(RuleBasedStateMachine):
    """Sequences with two kinds of prefixes arrive, compute, grow and end; no name leads to wrong content."""

    @initialize(blocks=st.integers(3, 12))
    def start(self, blocks: int) -> None:
        self.kv = KVManager(BlockPool(blocks), 2)
        self.live: list[Sequence] = []
        self.content: dict[int, tuple[int, ...]] = {}
        self.counter = 0

    @rule(length=st.integers(1, 9), family=st.integers(0, 1), tail=st.integers(0, 1))
    def arrive(self, length: int, family: int, tail: int) -> None:
        seq = sequence(f"s{self.counter}", [family] * (length - 1) + [tail])
        self.counter += 1
        match = self.kv.match(seq)
        if match.pending is not None:
            assert match.pending in {s.id for s in self.live}
        if not self.kv.can_admit(seq, match):
            return
        self.kv.admit(seq, match)
        assert seq.computed_tokens < seq.length
        for index, block in enumerate(seq.blocks):
            assert self.content[block] == tuple(seq.tokens(0, 2 * index + 2)), "a name led to another prefix"
        self.live.append(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 5))
    def work(self, data: st.DataObject, count: int) -> None:
        seq = data.draw(st.sampled_from(self.live))
        count = min(count, seq.missing_tokens)
        if not self.kv.can_extend(seq, seq.computed_tokens + count):
            return
        self.kv.extend(seq, seq.computed_tokens + count)
        for place in range(seq.computed_tokens, seq.computed_tokens + count):
            block = seq.blocks[place // 2]
            owners = [s for s in self.live if block in s.blocks]
            assert owners == [seq], "a block that other sequences read is written"
            self.content[block] = tuple(seq.tokens(0, place + 1))
        self.kv.commit(seq, count, seq.length)
        if seq.missing_tokens == 0:
            seq.append([data.draw(st.integers(0, 1))])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.kv.release(seq)
        assert (seq.blocks, seq.computed_tokens) == ([], 0)

    @rule()
    def forget(self) -> None:
        self.kv.pool.forget_all()

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_integrity()
            assert self.kv.pool.used == len({b for s in self.live for b in s.blocks})

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for seq in self.live:
                self.kv.release(seq)
            self.kv.check_integrity()
            assert self.kv.pool.used == 0
            assert not self.kv._pending


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
