"""Stress test on a tiny pool with random requests: no leaks, no starvation, right answers."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fovea.engine import keep as keeping
from fovea.engine import sequence as sequences
from fovea.engine.config.schedule import POLICY_NAMES
from fovea.engine.keep import KeepRule
from fovea.engine.kv import manager
from fovea.engine.sequence import Sequence
from tests.support.brains import BLOCK_SIZE, MOST_IMAGE, SlotRunner, answer, points_of, scheduler, sequence
from tests.support.thorough import examples

BLOCK, IMAGE = BLOCK_SIZE, 10
SHARES = [KeepRule("snap", share=0.5), KeepRule("text", share=0.3), KeepRule("images", share=0.7)]
BOUNDS = [KeepRule("snap", tokens=8), KeepRule("text", tokens=12), KeepRule("images", tokens=9)]
PIECES = st.one_of(
    st.integers(0, 2),
    st.tuples(st.sampled_from(["cat", "dog", "elk"]), st.integers(1, 5)),
)


class Stress(RuleBasedStateMachine):
    """Random operations on a scheduler with random budgets, cache sizes and policy."""

    def __init__(self) -> None:
        super().__init__()
        self.patches: list[Any] = []

    @initialize(
        blocks=st.integers(2, 14),
        step=st.integers(1, 12),
        visual=st.integers(1, 8),
        running=st.integers(1, 5),
        embed=st.sampled_from([0, 10, 25, 1000]),
        share=st.booleans(),
        host=st.integers(0, 6),
        states=st.sampled_from([0, 0, 2, 3, 8]),
        spacing=st.sampled_from([0, 2, 4]),
        window=st.sampled_from([0, 0, 1, 3, 6]),
        whole_images=st.booleans(),
        lasting_images=st.booleans(),
        policy=st.sampled_from(POLICY_NAMES),
        passes=st.integers(0, 3),
        late=st.sampled_from([0, 0, 1, 5]),
        drafts=st.sampled_from([0, 0, 3, 12]),
        seed=st.integers(0, 9),
    )
    def start(
        self,
        blocks: int,
        step: int,
        visual: int,
        running: int,
        embed: int,
        share: bool,
        host: int,
        states: int,
        spacing: int,
        window: int,
        whole_images: bool,
        lasting_images: bool,
        policy: str,
        passes: int,
        late: int,
        drafts: int,
        seed: int,
    ) -> None:
        self.room, self.late = blocks * BLOCK, late
        if window:  # no model has both a window and states, or blocks in host memory
            host = states = 0
        for module in (keeping, manager, sequences):  # small enough for these prompts
            self.patches.append(patch.object(module, "WINDOW", 2))
        self.patches += [patch.object(keeping, name, 1) for name in ("RECENT", "SINKS")]
        for each in self.patches:
            each.start()
        whole_images = whole_images and not states
        self.rules = [] if states else SHARES if window or whole_images else [*SHARES, *BOUNDS]
        enough = (window + step + MOST_IMAGE) // BLOCK + 2
        self.brain = scheduler(
            blocks=blocks,
            block_size=BLOCK,
            embed_bytes=embed,
            prefix_cache=share,
            host_slots=host,
            state_slots=states,
            state_spacing=spacing,
            window=window,
            window_blocks=enough,
            whole_images=whole_images,
            lasting_images=lasting_images,
            max_step_tokens=step,
            max_step_visual_tokens=visual,
            max_running=running,
            policy=policy,
            max_passes=passes,
        )
        random = Random(seed)
        self.runner = SlotRunner(
            self.brain,
            image_bytes=IMAGE,
            slices=lambda: random.randint(1, 3),
            late=lambda: random.randint(0, late),
            drafts=lambda seq, new: self.guess(seq, new, random.randint(0, drafts)),
        )
        self.sequences: list[Sequence] = []
        self.cancelled: set[str] = set()

    def guess(self, seq: Sequence, new: list[int], count: int) -> list[int]:
        """The next tokens of an answer; sometimes the last one is wrong."""
        if not count or seq.id in self.cancelled:
            return []
        first = len(seq.output_ids) + len(new)
        ahead = answer(seq)[first : first + count]
        return [*ahead[:-1], ahead[-1] + count % 2] if ahead else []

    @rule(
        prompt=st.lists(PIECES, min_size=1, max_size=8),
        max_tokens=st.integers(1, 10),
        salt=st.sampled_from(["", "t"]),
        rule=st.integers(0, 11),
    )
    def arrive(self, prompt: list[int | tuple[str, int]], max_tokens: int, salt: str, rule: int) -> None:
        number = len(self.sequences)
        keep = self.rules[rule] if rule < len(self.rules) else None
        seq = sequence(f"s{number}", prompt, arrival=number // 2, max_tokens=max_tokens, salt=salt, keep=keep)
        if len(seq.prompt_ids) + max_tokens > self.room:
            return  # the engine rejects requests that can never fit
        self.sequences.append(seq)
        self.brain.add(seq)

    @precondition(lambda self: not self.brain.idle)
    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if not self.brain.idle:
                plan = self.runner.step()
                assert plan or self.runner.held or self.brain.idle, "sequences wait, yet the step is empty"

    @precondition(lambda self: not self.brain.idle)
    @rule()
    def failing_step(self) -> None:
        """A step fails on the device: what it wrote is not usable."""
        plan = self.brain.schedule()
        self.runner.spoil(plan)
        self.brain.abandon(plan)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.sequences))
        if seq.finish_reason is None:
            self.cancelled.add(seq.id)
        self.brain.finish(seq, "abort")

    @rule()
    def clear_caches(self) -> None:
        self.brain.kv.forget_all()
        self.brain.embeddings.clear()

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "brain"):
            self.brain.check_integrity()
            cache = self.brain.embeddings
            assert cache.bytes <= cache.capacity + 3 * IMAGE, "images of several requests exceed the ceiling"
            passed = [seq.times_passed for seq in self.sequences]
            assert max(passed, default=0) <= self.brain.config.max_passes, "a sequence was passed too often"

    def teardown(self) -> None:
        try:
            if hasattr(self, "brain"):
                self.end()
        finally:
            for each in self.patches:
                each.stop()

    def end(self) -> None:
        """Run everything to its end, and compare the answers."""
        # The oldest sequence is never preempted and advances in every step, by a token or by one of three
        # slices of an image (which is encoded again for each of its spans if nothing is cached), or waits
        # for a late token. So the number of steps is bounded.
        work = sum(len(seq.prompt_ids) + seq.max_tokens + 3 * len(seq.spans) for seq in self.sequences)
        waits = (self.late + 1) * sum(seq.max_tokens for seq in self.sequences)
        points = sum(len(list(points_of(seq))) for seq in self.sequences if seq.keep is not None)
        self.runner.run(limit=2 * work + waits + 6 * points + 2 * work * bool(points) + 1)
        for seq in self.sequences:
            assert seq.finish_reason is not None
            truth = answer(seq)
            if seq.id in self.cancelled:
                assert seq.output_ids == truth[: len(seq.output_ids)]
            else:
                assert seq.output_ids == truth
        assert self.brain.kv.pool.used == 0
        assert self.brain.kv.window is None or self.brain.kv.window.pool.used == 0
        assert self.brain.kv.states is None or self.brain.kv.states.slots.used == 0
        assert self.brain.embeddings.bytes <= self.brain.embeddings.capacity


TestStress = Stress.TestCase
TestStress.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)
