"""Drafts in the scheduler: they save steps, and change neither answers nor what the caches hold."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from fovea.engine.sequence import Drafts, Sequence
from tests.support.brains import SlotRunner, answer, rows, scheduler, sequence


def next_tokens(seq: Sequence, new: list[int], count: int) -> list[int]:
    """The next tokens of an answer with `new` tokens at its end."""
    ahead = Sequence(seq.id, seq.prompt_ids, seq.sampling, seq.max_tokens, seq.spans, salt=seq.salt)
    ahead.append([*seq.output_ids, *new])
    for _ in range(count):
        ahead.append([rows(ahead)[-1] % 97])
    return ahead.output_ids[len(seq.output_ids) + len(new) :]


def test_right_drafts_save_their_steps() -> None:
    brain = scheduler()
    runner = SlotRunner(brain, drafts=lambda seq, new: next_tokens(seq, new, 3))
    seq = sequence("a", 6, max_tokens=9)
    brain.add(seq)
    plans = runner.run()
    assert [plan.tokens for plan in plans] == [6, 4, 4]
    assert seq.output_ids == answer(seq)


def test_wrong_drafts_cost_no_token_and_leave_no_trace_in_the_prefix_cache() -> None:
    brain = scheduler(block_size=4)
    runner = SlotRunner(brain, drafts=lambda seq, new: [98] * 5)
    seq = sequence("a", 6, max_tokens=12)
    brain.add(seq)
    assert [plan.tokens for plan in runner.run()][:4] == [6, 6, 6, 6]
    assert seq.output_ids == answer(seq)
    runner.drafts = lambda seq, new: []
    again = sequence("b", [*seq.prompt_ids, *seq.output_ids], max_tokens=2, arrival=1)
    brain.add(again)
    runner.run()  # checks every block that is read
    assert again.cached_tokens >= 12
    assert again.output_ids == answer(again)


def test_drafts_end_where_the_answer_ends() -> None:
    brain = scheduler()
    runner = SlotRunner(brain, drafts=lambda seq, new: next_tokens(seq, new, 30))
    seq = sequence("a", 3, max_tokens=5)
    brain.add(seq)
    assert [plan.tokens for plan in runner.run()] == [3, 4]
    assert len(seq.output_ids) == 5


def test_nobody_is_preempted_for_drafts() -> None:
    brain = scheduler(blocks=4, block_size=4)
    runner = SlotRunner(brain, drafts=lambda seq, new: next_tokens(seq, new, 8))
    seqs = [sequence(name, [ord(name)] * 5, arrival=i, max_tokens=4) for i, name in enumerate("ab")]
    for seq in seqs:
        brain.add(seq)
    runner.run()
    assert brain.preemptions == 0
    assert [seq.output_ids for seq in seqs] == [answer(seq) for seq in seqs]


def test_a_preempted_sequence_has_no_drafts() -> None:
    brain = scheduler(blocks=5, block_size=2, prefix_cache=False)
    runner = SlotRunner(brain, drafts=lambda seq, new: next_tokens(seq, new, 2))
    seqs = [sequence(name, [ord(name)] * 3, arrival=i, max_tokens=6) for i, name in enumerate("ab")]
    for seq in seqs:
        brain.add(seq)
    while not brain.preemptions:
        runner.step()
    assert all(not seq.drafts for seq in brain.waiting)
    runner.run()
    assert [seq.output_ids for seq in seqs] == [answer(seq) for seq in seqs]


@given(
    prompts=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    right=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    wrong=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    tokens=st.integers(2, 9),
    blocks=st.integers(10, 24),
    states=st.sampled_from([0, 2, 4, 30]),
    late=st.lists(st.integers(0, 4), min_size=1, max_size=9),
)
def test_any_drafts_give_the_same_answers(
    prompts: list[int],
    right: list[int],
    wrong: list[int],
    tokens: int,
    blocks: int,
    states: int,
    late: list[int],
) -> None:
    """Also if tokens are late, so that accepted drafts behind them are computed again."""
    brain = scheduler(
        blocks=blocks, block_size=3, max_step_tokens=tokens, state_slots=states, state_spacing=3
    )
    calls = 0

    def drafts(seq: Sequence, new: list[int]) -> list[int]:
        nonlocal calls
        calls += 1
        return next_tokens(seq, new, right[calls % len(right)]) + [98] * wrong[calls % len(wrong)]

    runner = SlotRunner(brain, drafts=drafts, late=lambda: late[calls % len(late)])
    seqs = [sequence(f"s{i}", size, arrival=i, max_tokens=8) for i, size in enumerate(prompts)]
    for seq in seqs:
        brain.add(seq, Drafts.certain(drafts(seq, [])))
    runner.run()
    assert [seq.output_ids for seq in seqs] == [answer(seq) for seq in seqs]


def test_drafts_do_not_delay_the_decodes_of_others() -> None:
    """The drafts of the first sequence took whole steps, and the others got no token for as long."""
    brain = scheduler(max_step_tokens=6)
    runner = SlotRunner(brain, drafts=lambda seq, new: next_tokens(seq, new, 9) if seq.id == "a" else [])
    seqs = [sequence(name, [ord(name)] * 2, arrival=i, max_tokens=12) for i, name in enumerate("abc")]
    for seq in seqs:
        brain.add(seq)
    while not all(seq.decoding for seq in brain.running) or len(brain.running) < 3:
        runner.step()
    while len(brain.running) == 3:
        plan = runner.step()
        assert {work.seq.id for work in plan.work} == {"a", "b", "c"}
    runner.run()
    assert [seq.output_ids for seq in seqs] == [answer(seq) for seq in seqs]


def test_drafts_at_the_beginning_are_computed_with_the_end_of_the_prompt() -> None:
    brain = scheduler(max_step_tokens=8)
    runner = SlotRunner(brain)
    seq = sequence("a", 10, max_tokens=6)
    brain.add(seq, Drafts.certain(next_tokens(seq, [], 3)))
    assert [plan.tokens for plan in runner.run()] == [8, 2 + 3, 1, 1]
    assert seq.output_ids == answer(seq)


def test_a_prompt_that_fits_without_its_drafts_is_not_delayed_by_them() -> None:
    brain = scheduler(blocks=3, block_size=4)
    runner = SlotRunner(brain)
    seq = sequence("a", 11, max_tokens=1)
    brain.add(seq, Drafts.certain([1] * 9))
    assert seq.drafts == []
    longer = sequence("b", 10, arrival=1, max_tokens=3)
    brain.add(longer, Drafts.certain([98] * 2))
    runner.run()
    assert longer.output_ids == answer(longer)
