"""Tests of checkpoints of states: where later sequences continue, and what few slots may cost."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fovea.engine.schedule.plan import StepPlan
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.sequence import Drafts, Sequence
from fovea.kernels import NO_SLOT
from tests.support.brains import SlotRunner, answer, rows, scheduler, sequence
from tests.support.thorough import examples

BLOCK = 4


def brain(*, slots: int = 24, **more: Any) -> tuple[Scheduler, SlotRunner]:
    made = scheduler(blocks=64, block_size=BLOCK, state_slots=slots, **more)
    return made, SlotRunner(made)


def run(scheduler: Scheduler, runner: SlotRunner, *seqs: Sequence) -> None:
    for seq in seqs:
        scheduler.add(seq)
    runner.run()
    for seq in seqs:
        assert seq.output_ids == answer(seq)


def states_of(scheduler: Scheduler) -> Any:
    assert scheduler.kv.states is not None
    return scheduler.kv.states.slots


@pytest.mark.parametrize("length", [2, 3, BLOCK, BLOCK + 1, 11, 3 * BLOCK, 3 * BLOCK + 1])
@pytest.mark.parametrize("answered", [1, 2, 9])
def test_a_repeated_prompt_computes_only_its_last_token(length: int, answered: int) -> None:
    """Wherever the prompt ends in a block, and however far its first answer has filled that block."""
    made, runner = brain()
    run(made, runner, sequence("first", length, max_tokens=answered))
    again = sequence("again", length, arrival=1)
    run(made, runner, again)
    assert again.cached_tokens == length - 1


@pytest.mark.parametrize("answered", range(1, 2 * BLOCK + 2))
def test_a_follow_up_continues_from_the_end_of_the_answer(answered: int) -> None:
    """The last token of an answer is never computed, so its state and its KV are missing."""
    made, runner = brain()
    first = sequence("first", [1, 2, ("cat", 5), 3], max_tokens=answered)
    run(made, runner, first)
    follow_up = sequence("next", [1, 2, ("cat", 5), 3, *first.output_ids, 7, 8], arrival=1)
    run(made, runner, follow_up)
    assert follow_up.cached_tokens == len(first.prompt_ids) + answered - 1


@pytest.mark.parametrize("step", [5, 64])
@pytest.mark.parametrize("before", range(BLOCK))
def test_questions_about_one_new_image_prefill_it_once(step: int, before: int) -> None:
    """The image may end anywhere in a block; the others wait for the first one, then copy and continue."""
    made, runner = brain(slots=40, max_step_tokens=step)
    seqs = [sequence(f"q{n}", [*range(before), ("cat", 10), 50 + n, 60 + n], max_tokens=2) for n in range(6)]
    run(made, runner, *seqs)
    image_end = before + 10
    assert [seq.cached_tokens for seq in seqs] == [0] + [image_end] * 5
    assert runner.computed_tokens == image_end + sum(seq.length - 1 - image_end for seq in seqs)
    assert runner.encoded == ["cat"]


def test_a_preempted_sequence_resumes_from_its_state() -> None:
    """It repeats none of the tokens that were computed, because its blocks and its state are both kept."""
    made = scheduler(blocks=9, block_size=2, state_slots=8)
    runner = SlotRunner(made)
    seqs = [sequence(name, [ord(name)] * 5, arrival=n, max_tokens=8) for n, name in enumerate("ab")]
    for seq in seqs:
        made.add(seq)
    while not made.preemptions:
        runner.step()
    computed, length = runner.computed_tokens, seqs[1].length
    made.finish(seqs[0], "abort")
    plan = runner.step()
    assert [(work.seq.id, work.start) for work in plan.work] == [("b", length - 1)]
    runner.run()
    assert runner.computed_tokens == computed + len(seqs[1].prompt_ids) + 8 - length
    assert seqs[1].output_ids == answer(seqs[1])


def test_generations_and_salts_share_no_state() -> None:
    made, runner = brain()
    made.kv.names._ttl_s = 10
    run(made, runner, sequence("first", 9))
    for name, arrival, salt, cached in [("old", 10, "", 0), ("other", 9, "tenant", 0), ("same", 9, "", 8)]:
        seq = sequence(name, 9, arrival=arrival, salt=salt)
        run(made, runner, seq)
        assert seq.cached_tokens == cached, name


def test_a_scored_prompt_is_computed_whole_and_its_state_is_kept_for_others() -> None:
    made, runner = brain()
    run(made, runner, sequence("first", 9))
    scored, later = sequence("scored", 9, arrival=1), sequence("later", 9, arrival=2)
    scored.scores_prompt = True
    run(made, runner, scored)
    assert scored.cached_tokens == 0
    run(made, runner, later)
    assert later.cached_tokens == 8


def test_a_failed_step_leaves_no_checkpoint() -> None:
    """The slots of a failed step hold anything, so nobody continues from one of them."""
    made, runner = brain(state_spacing=2)
    seq = sequence("first", 9)
    made.add(seq)
    plan = made.schedule()
    runner.spoil(plan)
    made.abandon(plan)
    slots = states_of(made)
    assert (slots.checkpoints, slots.used) == (0, 0)
    assert not slots._parts
    runner.run()
    assert seq.output_ids == answer(seq)


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_slots_never_exceed_their_number_and_everyone_is_served(slots: int) -> None:
    made, runner = brain(slots=slots, state_spacing=3, max_running=8)
    seqs = [sequence(f"s{n}", [n % 3, ("cat", 6), n], arrival=n, max_tokens=5) for n in range(9)]
    for seq in seqs:
        made.add(seq)
    most = 0
    while not made.idle:
        plan = runner.step()
        assert plan
        assert len(made.running) <= slots
        most = max(most, states_of(made).used)
        assert states_of(made).used + states_of(made).checkpoints <= slots
    assert most <= slots
    assert [seq.output_ids for seq in seqs] == [answer(seq) for seq in seqs]


def ahead(seq: Sequence, new: Seq[int], count: int) -> list[int]:
    """The next `count` tokens of an answer with `new` tokens at its end."""
    copy = Sequence(seq.id, seq.prompt_ids, seq.sampling, seq.max_tokens, seq.spans, salt=seq.salt)
    copy.append([*seq.output_ids, *new])
    for _ in range(count):
        copy.append([rows(copy)[-1] % 97])
    return copy.output_ids[len(seq.output_ids) + len(new) :]


@pytest.mark.parametrize("slots", [2, 3, 4, 20])
def test_an_answer_continues_after_accepted_and_rejected_drafts(slots: int) -> None:
    """The end of an answer is a checkpoint, whichever of its tokens were drafts."""
    made = scheduler(block_size=BLOCK, state_slots=slots)
    runner = SlotRunner(made, drafts=lambda seq, new: [*ahead(seq, new, 2), 98])
    first = sequence("first", 6, max_tokens=12)
    run(made, runner, first)
    again = sequence("again", [*first.prompt_ids, *first.output_ids], max_tokens=2, arrival=1)
    run(made, runner, again)
    assert again.cached_tokens == len(first.prompt_ids) + 12 - 1


def check_slots(plan: StepPlan) -> None:
    """No slot has two writers in a step, and none that a sequence writes is read by another one.

    Kernels compute the sequences of a step in any order, and at the same time.
    """
    writers: dict[int, str] = {}
    for work in plan.work:
        assert work.state is not None
        slots = [slot for _, slot in work.state.saves]
        assert len(set(slots)) == len(slots)
        assert not set(slots) & set(writers)
        writers |= dict.fromkeys(slots, work.seq.id)
    for work in plan.work:
        assert work.state is not None
        if work.state.source != NO_SLOT:
            assert writers.get(work.state.source, work.seq.id) == work.seq.id


@settings(max_examples=examples(150), deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_schedule_with_few_slots_gives_the_same_answers(seed: int) -> None:
    """Random requests, drafts, failures and lost caches, with 2 to 20 slots: right answers, and no leak."""
    World(Random(seed)).live()


class World:
    """A scheduler under random events. Everything random comes from one generator."""

    def __init__(self, random: Random) -> None:
        self.random = random
        size, blocks = random.randint(1, 4), random.randint(3, 16)
        self.room = size * blocks
        self.brain = scheduler(
            blocks=blocks,
            block_size=size,
            embed_bytes=random.choice([0, 10, 25, 1000]),
            prefix_cache=random.random() < 0.9,
            host_slots=random.choice([0, 0, 3, 6]),
            state_slots=random.choice([2, 2, 3, 4, 5, 8, 20]),
            state_spacing=random.randint(0, 5),
            max_step_tokens=random.randint(1, 14),
            max_step_visual_tokens=random.randint(1, 8),
            max_running=random.randint(1, 6),
            policy=random.choice(["dual", "fcfs", "priority", "detail"]),
            max_passes=random.randint(0, 3),
        )
        self.runner = SlotRunner(self.brain, slices=lambda: random.randint(1, 3), drafts=self.drafts)
        self.prompts: dict[str, list[int | tuple[str, int]]] = {}
        self.seqs: list[Sequence] = []
        self.ended: set[str] = set()
        self.clock = 0

    def drafts(self, seq: Sequence, new: list[int]) -> list[int]:
        if self.random.random() < 0.4:
            return []
        return ahead(seq, new, self.random.randint(0, 4)) + [98] * self.random.randint(0, 3)

    def live(self) -> None:
        events = (self.arrive, self.step, self.step, self.fail, self.end, self.lose)
        for _ in range(self.random.randint(5, 40)):
            self.random.choice(events)()
            self.brain.check_integrity()
        self.runner.run()
        for seq in self.seqs:
            assert seq.finish_reason is not None
            if not seq.encode_only:
                truth = answer(seq)
                assert seq.output_ids == truth[: len(seq.output_ids)]
                assert seq.id in self.ended or seq.output_ids == truth
        kv, slots = self.brain.kv, states_of(self.brain)
        assert (kv.pool.used, slots.used) == (0, 0)
        assert not kv._pending
        assert not kv._expected
        assert set(slots._part_of) <= set(slots._by_name), "names of rows outlive their checkpoints"

    def arrive(self) -> None:
        random, pieces = self.random, list[int | tuple[str, int]]()
        if self.seqs and random.random() < 0.5:  # a follow-up, or another question about the same prefix
            earlier = random.choice(self.seqs)
            pieces = [*self.prompts[earlier.id], *earlier.output_ids[: random.choice([0, 100])]]
            pieces += [random.randint(0, 2) for _ in range(random.randint(0, 3))]
        for _ in range(0 if pieces else random.randint(1, 8)):
            image = random.choice(["cat", "dog", "elk"]), random.randint(1, 5)
            pieces.append(image if random.random() < 0.4 else random.randint(0, 2))
        self.clock += random.randint(0, 1)
        seq = sequence(
            f"s{len(self.seqs)}",
            pieces,
            arrival=self.clock,
            max_tokens=random.randint(1, 10),
            salt=random.choice(["", "", "t"]),
        )
        if len(seq.prompt_ids) + seq.max_tokens > self.room:
            return
        seq.scores_prompt = random.random() < 0.1
        seq.encode_only = bool(seq.spans) and random.random() < 0.1
        self.prompts[seq.id] = pieces
        self.seqs.append(seq)
        self.brain.add(seq, Drafts.certain(ahead(seq, [], random.randint(0, 3))))

    def step(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            if not self.brain.idle:
                plan = self.runner.step()
                assert plan, "sequences wait, yet the step is empty"
                check_slots(plan)

    def fail(self) -> None:
        """A step of all sequences, or of some suspects, fails on the device."""
        only = {seq.id for seq in self.seqs if self.random.random() < 0.5}
        plan = self.brain.schedule(only=self.random.choice([None, only]))
        check_slots(plan)
        self.runner.spoil(plan)
        self.brain.abandon(plan)

    def end(self) -> None:
        if self.seqs:
            seq = self.random.choice(self.seqs)
            if seq.finish_reason is None:
                self.ended.add(seq.id)
            self.brain.finish(seq, self.random.choice(["abort", "error", "stop"]))

    def lose(self) -> None:
        kv = self.brain.kv
        forget = (kv.forget_all, kv.pool.forget_all, kv.host.forget_all, states_of(self.brain).forget_all)
        self.random.choice(forget)()
        if self.random.random() < 0.5:
            self.brain.embeddings.clear()
