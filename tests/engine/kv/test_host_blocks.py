"""Tests of image prefixes in host memory: which blocks are saved, loaded, and forgotten after a failure."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fovea.engine.kv.blocks import HostBlocks
from fovea.engine.sequence import Sequence
from tests.support.brains import SlotRunner, answer, scheduler, sequence
from tests.support.thorough import examples

CAT = [1, ("cat", 10), 2]
DOG = [1, ("dog", 10), 2]
TEXT = [7] * 28


def ask(runner: SlotRunner, name: str, prompt: list[int | tuple[str, int]]) -> Sequence:
    """Run one request to its end. Its answer is right, whichever blocks were saved, evicted or loaded."""
    seq = sequence(name, prompt, max_tokens=2)
    runner.scheduler.add(seq)
    runner.run()
    assert seq.output_ids == answer(seq)
    return seq


@pytest.mark.parametrize(("slots", "cached_tokens"), [(0, 0), (1, 4), (3, 11), (8, 11)])
def test_a_follow_up_loads_the_blocks_that_the_pool_evicted(slots: int, cached_tokens: int) -> None:
    """The prompt is 1 token, 10 tokens of an image, and 1 more token.

    With blocks of 4 tokens, three blocks hold the image, the last one in part. The pool evicts the last block
    first, and host memory evicts it first, too. So with one slot, host memory holds the first block.
    """
    runner = SlotRunner(scheduler(blocks=8, host_slots=slots, embed_bytes=0))
    ask(runner, "cat", CAT)
    ask(runner, "text", TEXT)
    assert runner.encoded == ["cat"]
    follow_up = ask(runner, "again", [1, ("cat", 10), 3, 3])
    host = runner.scheduler.kv.host
    assert runner.encoded == (["cat"] if slots >= 3 else ["cat", "cat"])
    assert follow_up.cached_tokens == cached_tokens
    assert host.loads == -(-cached_tokens // 4)


def test_text_is_not_saved() -> None:
    runner = SlotRunner(scheduler(blocks=8, host_slots=8))
    ask(runner, "text", TEXT)
    ask(runner, "other", [8] * 28)
    assert len(runner.scheduler.kv.host) == 0


def test_the_text_before_an_image_is_saved_with_it() -> None:
    """Without the blocks of the system prompt, those of the image could not be reused."""
    runner = SlotRunner(scheduler(blocks=8, host_slots=8, embed_bytes=0))
    ask(runner, "cat", [*[5] * 8, ("cat", 8), 2])
    ask(runner, "text", TEXT)
    again = ask(runner, "again", [*[5] * 8, ("cat", 8), 3])
    assert again.cached_tokens == 16


def test_a_block_that_host_memory_holds_is_not_saved_again() -> None:
    runner = SlotRunner(scheduler(blocks=8, host_slots=8, embed_bytes=0))
    for round_ in range(4):
        ask(runner, f"cat{round_}", CAT)
        ask(runner, f"text{round_}", TEXT)
    assert len(runner.scheduler.kv.host) == 3
    assert runner.scheduler.kv.host.evictions == 0


def test_two_requests_at_once_load_a_prefix_once() -> None:
    runner = SlotRunner(scheduler(blocks=12, host_slots=8, embed_bytes=0))
    ask(runner, "cat", CAT)
    ask(runner, "text", [7] * 44)
    before = runner.scheduler.kv.host.loads
    both = [sequence(f"again{i}", [1, ("cat", 10), 3 + i], max_tokens=2) for i in range(2)]
    for seq in both:
        runner.scheduler.add(seq)
    runner.run()
    assert [seq.output_ids for seq in both] == [answer(seq) for seq in both]
    assert runner.scheduler.kv.host.loads - before == 3


def test_after_a_failed_step_its_blocks_are_not_reused() -> None:
    """It is unknown which moves were done, so loaded blocks get no name and host memory is cleared."""
    runner = SlotRunner(scheduler(blocks=8, host_slots=8, embed_bytes=0))
    ask(runner, "cat", CAT)
    ask(runner, "text", TEXT)
    brain = runner.scheduler
    seq = sequence("again", [1, ("cat", 10), 3], max_tokens=2)
    brain.add(seq)
    plan = brain.schedule()
    assert {move.kind for move in plan.moves} == {"load"}
    assert {move.owner for move in plan.moves} == {"again"}
    brain.abandon(plan)
    assert (seq.computed_tokens, seq.blocks, brain.waiting) == (0, [], [seq])
    brain.finish(seq, "error")
    brain.check_integrity()
    assert len(brain.kv.host) == 0
    assert brain.kv.match(sequence("more", [1, ("cat", 10), 3])).blocks == ()
    ask(runner, "at last", CAT)


def test_the_blocks_of_a_request_cancelled_between_plan_and_update_stay_valid() -> None:
    runner = SlotRunner(scheduler(blocks=8, host_slots=8, embed_bytes=0))
    ask(runner, "cat", CAT)
    ask(runner, "text", TEXT)
    brain = runner.scheduler
    seq = sequence("again", [1, ("cat", 10), 3], max_tokens=2)
    brain.add(seq)
    plan = brain.schedule()
    runner._copy(plan)
    brain.finish(seq, "abort")
    brain.update(plan, {})
    brain.check_integrity()
    assert ask(runner, "more", [1, ("cat", 10), 4]).cached_tokens == 11


def test_visual_blocks_are_counted_separately() -> None:
    brain = scheduler(blocks=16, host_slots=0)
    runner = SlotRunner(brain)
    seq = sequence("cat", CAT, max_tokens=4)
    brain.add(seq)
    while not seq.output_ids:
        runner.step()
    assert (brain.kv.pool.used, brain.kv.pool.used_visual) == (3, 3)
    runner.run()
    assert brain.kv.pool.used_visual == 0
    assert brain.kv.pool.cached_visual == 3


class HostMachine(RuleBasedStateMachine):
    """Save and load names in random order: a name leads to the slot that was reserved for it, or to none."""

    @initialize(slots=st.integers(0, 4))
    def start(self, slots: int) -> None:
        self.host = HostBlocks(slots)
        self.truth: dict[int, set[bytes]] = {}

    @rule(name=st.integers(0, 9), parts=st.lists(st.integers(10, 15), max_size=2, unique=True))
    def put(self, name: int, parts: list[int]) -> None:
        full, some = bytes([name]), tuple((bytes([p]), 1 + p % 3) for p in parts)
        slot = self.host.put(full, some)
        if slot is not None:
            self.truth[slot] = {full, *(part for part, _ in some)}

    @rule(names=st.sets(st.integers(0, 9), max_size=3), new=st.integers(0, 9))
    def load(self, names: set[int], new: int) -> None:
        slots = {slot for name in names if (slot := self.host.find(bytes([name]))) is not None}
        self.host.lock(slots)
        slot = self.host.put(bytes([new]), ())
        assert slot not in slots, "a slot that is about to be loaded was reused"
        if slot is not None:
            self.truth[slot] = {bytes([new])}
        self.host.unlock()

    @rule()
    def forget(self) -> None:
        self.host.forget_all()

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "host"):
            return
        self.host.check_integrity()
        assert len(self.host) <= self.host.size
        for name in (bytes([n]) for n in range(16)):
            slot = self.host.find(name) if name[0] < 10 else (self.host.find_part(name) or (None,))[0]
            assert slot is None or name in self.truth[slot]


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
