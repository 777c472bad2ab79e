"""Tests of the scheduler: budgets, order, shared work, preemption.

A fake runner checks every block that is read.
"""

from __future__ import annotations

import pytest

from fovea.engine.keep import KeepRule
from fovea.engine.schedule.itl_limit import PromptBudget
from fovea.engine.schedule.plan import Budget, EncodeJob, StepPlan, Work
from fovea.engine.sequence import Sequence, Status
from tests.support import brains
from tests.support.brains import SlotRunner, answer, scheduler, sequence


def amounts(plan: StepPlan) -> dict[str, int]:
    return {work.seq.id: work.count for work in plan.work}


def test_a_prompt_is_computed_in_chunks_of_the_step_budget() -> None:
    brain = scheduler(max_step_tokens=5)
    runner = SlotRunner(brain)
    seq = sequence("a", 12, max_tokens=2)
    brain.add(seq)
    assert [plan.tokens for plan in runner.run()] == [5, 5, 2, 1]
    assert seq.output_ids == answer(seq)
    assert (seq.status, seq.finish_reason) == (Status.FINISHED, "length")


def test_a_sequence_whose_token_is_late_is_in_no_step_and_the_others_go_on() -> None:
    brain = scheduler()
    late = iter([0, 0, 2])
    runner = SlotRunner(brain, late=lambda: next(late, 0))
    seqs = [sequence(name, 3, arrival=when, max_tokens=5) for name, when in (("a", 0.0), ("b", 0.1))]
    for seq in seqs:
        brain.add(seq)
    plans = runner.run()
    assert ["".join(sorted(amounts(plan))) for plan in plans] == ["ab", "ab", "b", "b", "ab", "a", "a"]
    assert [seq.output_ids for seq in seqs] == [answer(seq) for seq in seqs]


def test_decodes_come_first_and_a_long_prompt_gets_the_rest_of_the_budget() -> None:
    brain = scheduler(max_step_tokens=6)
    runner = SlotRunner(brain)
    for name, when in (("a", 0.0), ("b", 0.1)):
        brain.add(sequence(name, [ord(name)] * 3, arrival=when, max_tokens=9))
    runner.step()
    brain.add(sequence("long", [5] * 40, arrival=0.2))
    plan = runner.step()
    assert amounts(plan) == {"a": 1, "b": 1, "long": 4}
    assert [work.seq.id for work in plan.work] == ["a", "b", "long"]


def test_first_come_first_served() -> None:
    brain = scheduler(max_running=1)
    runner = SlotRunner(brain)
    for name, when in (("late", 2.0), ("early", 1.0), ("middle", 1.5)):
        brain.add(sequence(name, [ord(name[0])] * 3, arrival=when, max_tokens=1))
    assert [plan.work[0].seq.id for plan in runner.run()] == ["early", "middle", "late"]


def test_no_request_overtakes_a_prompt_that_waits_for_room() -> None:
    """Otherwise a stream of short prompts would starve a long one."""
    brain = scheduler(blocks=8, max_running=8)
    runner = SlotRunner(brain)
    brain.add(sequence("first", [1] * 12, arrival=0, max_tokens=3))
    runner.step()
    brain.add(sequence("long", [2] * 24, arrival=1, max_tokens=1))
    brain.add(sequence("short", [3] * 2, arrival=2, max_tokens=1))
    assert amounts(runner.step()) == {"first": 1}
    assert [seq.id for seq in brain.waiting] == ["long", "short"]
    runner.run()


def test_a_request_joins_when_its_first_image_is_encoded_and_holds_no_blocks_until_then() -> None:
    brain = scheduler(max_step_tokens=4)
    runner = SlotRunner(brain, slices=lambda: 3)
    seq = sequence("a", [1, 2, ("cat", 6), 6], max_tokens=1)
    brain.add(seq)
    for _ in range(3):
        plan = runner.step()
        assert [job.span.key for job in plan.encode] == ["cat"]
        assert (plan.tokens, brain.kv.pool.used, seq.status) == (0, 0, Status.WAITING)
    assert [plan.tokens for plan in runner.run()] == [4, 4, 1]
    assert seq.output_ids == answer(seq)


def test_a_later_image_of_a_prompt_is_encoded_beside_the_tokens_before_it() -> None:
    brain = scheduler(max_step_tokens=4)
    runner = SlotRunner(brain)
    seq = sequence("a", [1, ("cat", 6), 2, ("dog", 6), 3], max_tokens=1)
    brain.add(seq)
    plans = runner.run()
    assert [[job.span.key for job in plan.encode] for plan in plans] == [["cat"], ["dog"], [], [], []]
    assert [plan.tokens for plan in plans] == [0, 4, 4, 4, 3]
    assert seq.output_ids == answer(seq)


def test_tokens_stop_where_an_image_begins_that_is_not_encoded() -> None:
    brain = scheduler()
    runner = SlotRunner(brain, slices=lambda: 2)
    seq = sequence("a", [1, ("cat", 6), 2, ("dog", 6), 3], max_tokens=1)
    brain.add(seq)
    assert [plan.tokens for plan in runner.run()] == [0, 0, 8, 0, 7]
    assert seq.output_ids == answer(seq)


def test_text_passes_a_request_whose_image_is_being_encoded() -> None:
    brain = scheduler()
    runner = SlotRunner(brain, slices=lambda: 5)
    brain.add(sequence("image", [("cat", 6), 1], arrival=0, max_tokens=2))
    brain.add(sequence("text", [1, 2, 3], arrival=1, max_tokens=3))
    steps = [runner.step() for _ in range(3)]
    assert [amounts(plan) for plan in steps] == [{"text": 3}, {"text": 1}, {"text": 1}]
    assert all(job.span.key == "cat" for plan in steps for job in plan.encode)
    runner.run()


def test_under_first_come_first_served_text_does_not_pass_an_image() -> None:
    brain = scheduler(policy="fcfs")
    runner = SlotRunner(brain, slices=lambda: 5)
    brain.add(sequence("image", [("cat", 6), 1], arrival=0, max_tokens=2))
    brain.add(sequence("text", [1, 2, 3], arrival=1, max_tokens=3))
    steps = [runner.step() for _ in range(6)]
    assert [amounts(plan) for plan in steps] == [{}, {}, {}, {}, {}, {"image": 7, "text": 3}]
    runner.run()


def test_images_of_waiting_requests_are_encoded_ahead_as_far_as_the_cache_has_room() -> None:
    """The cache has room for two outputs of ten bytes. The third image waits until there is room."""
    brain = scheduler(max_running=1, embed_bytes=25)
    brain.images.token_bytes = 2
    runner = SlotRunner(brain)
    brain.add(sequence("busy", [9], max_tokens=8))
    runner.step()
    for i, key in enumerate(("cat", "dog", "elk")):
        brain.add(sequence(key, [(key, 5), i], arrival=1 + i, max_tokens=1))
    for _ in range(4):
        runner.step()
    assert runner.encoded == ["cat", "dog"]
    assert brain.embeddings.held_bytes == 20
    runner.run()
    assert runner.encoded == ["cat", "dog", "elk"]


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_no_request_is_passed_more_often_than_the_bound(passes: int) -> None:
    brain = scheduler(max_passes=passes)
    runner = SlotRunner(brain, slices=lambda: 50)
    image = sequence("image", [("cat", 6), 1], arrival=0, max_tokens=1)
    brain.add(image)
    texts = [sequence(f"t{i}", [i], arrival=1 + i, max_tokens=1) for i in range(6)]
    for seq in texts:
        brain.add(seq)
    for _ in range(10):
        runner.step()
    assert sum(seq.status is Status.FINISHED for seq in texts) == passes
    assert image.times_passed == passes
    runner.run()


def test_an_encode_only_request_takes_no_blocks_and_delays_no_other() -> None:
    brain = scheduler(max_passes=0, max_running=1)
    runner = SlotRunner(brain, slices=lambda: 3)
    ahead = sequence("ahead", [1, ("cat", 6), ("dog", 6)], arrival=0)
    ahead.encode_only = True
    brain.add(ahead)
    brain.add(sequence("text", [1, 2], arrival=1, max_tokens=2))
    assert [plan.tokens for plan in runner.run()] == [2, 1, 0, 0, 0, 0, 0]
    assert (ahead.status, ahead.output_ids, runner.encoded) == (Status.FINISHED, [], ["cat", "dog"])
    brain.add(sequence("question", [9, ("cat", 6), 3], arrival=2, max_tokens=1))
    runner.run()
    assert runner.encoded == ["cat", "dog"]


def test_an_encode_only_request_can_be_cancelled() -> None:
    brain = scheduler()
    runner = SlotRunner(brain, slices=lambda: 3)
    ahead = sequence("ahead", [("cat", 6)])
    ahead.encode_only = True
    brain.add(ahead)
    runner.step()
    brain.finish(ahead, "abort")
    assert brain.idle
    assert not brain.schedule()
    brain.check_integrity()


def test_priority_decides_among_requests_that_can_join() -> None:
    brain = scheduler(policy="priority", max_running=1)
    runner = SlotRunner(brain)
    for number, priority in enumerate((5, -1, 0)):
        seq = sequence(f"p{priority}", [number], arrival=number, max_tokens=1)
        seq.priority = priority
        brain.add(seq)
    assert [plan.work[0].seq.id for plan in runner.run()] == ["p-1", "p0", "p5"]


def test_the_bound_on_prompt_tokens_does_not_limit_decodes() -> None:
    brain = scheduler(max_running=8)
    runner = SlotRunner(brain)
    for name in "ab":
        brain.add(sequence(name, [ord(name)] * 2, max_tokens=9))
    runner.step()
    brain.add(sequence("long", [5] * 40, arrival=1))
    assert amounts(brain.schedule(PromptBudget(3))) == {"a": 1, "b": 1, "long": 3}


def test_an_image_larger_than_the_encoder_budget_is_encoded() -> None:
    brain = scheduler(max_step_visual_tokens=1)
    runner = SlotRunner(brain)
    brain.add(sequence("a", [("huge", 30), 1], max_tokens=1))
    brain.add(sequence("b", [("other", 3), 1], arrival=1, max_tokens=1))
    runner.run()
    assert runner.encoded == ["huge", "other"]


def test_one_image_in_two_sequences_is_encoded_once() -> None:
    brain = scheduler()
    runner = SlotRunner(brain)
    brain.add(sequence("a", [1, ("cat", 6), 2], max_tokens=2))
    brain.add(sequence("b", [9, ("cat", 6), 3], arrival=1, max_tokens=2))
    assert [job.holders for job in runner.step().encode] == [["a", "b"]]
    assert set(amounts(runner.step())) == {"a", "b"}
    runner.run()
    assert runner.encoded == ["cat"]


def test_one_image_twice_in_one_prompt_is_encoded_once_even_in_chunks() -> None:
    brain = scheduler(max_step_tokens=5)
    runner = SlotRunner(brain)
    seq = sequence("a", [1, ("cat", 4), 2, ("cat", 4), 3], max_tokens=2)
    brain.add(seq)
    runner.run()
    assert runner.encoded == ["cat"]
    assert seq.output_ids == answer(seq)


def test_one_image_twice_in_a_prompt_without_a_cache_is_encoded_at_most_twice() -> None:
    """Without room the output may be released at the end of the first span, and is then encoded again."""
    brain = scheduler(max_step_tokens=5, embed_bytes=0)
    runner = SlotRunner(brain)
    seq = sequence("a", [1, ("cat", 4), 2, ("cat", 4), 3], max_tokens=2)
    brain.add(seq)
    runner.run()
    assert len(runner.encoded) <= 2
    assert seq.output_ids == answer(seq)


def test_a_prefix_hit_over_an_image_needs_no_encoder() -> None:
    brain = scheduler(embed_bytes=0)
    runner = SlotRunner(brain)
    brain.add(sequence("a", [1, ("cat", 6), 2, 3], max_tokens=1))
    runner.run()
    brain.add(sequence("b", [1, ("cat", 6), 2, 9], max_tokens=1))
    runner.run()
    assert runner.encoded == ["cat"]


def test_followers_of_a_prefix_wait_until_it_is_computed() -> None:
    """The first of ten questions about one new image computes the tokens of the image for all of them."""
    brain = scheduler(blocks=200, max_step_tokens=16, max_running=16)
    runner = SlotRunner(brain)
    questions = [sequence(f"q{i}", [1, ("cat", 30), 2, 50 + i], arrival=i, max_tokens=2) for i in range(10)]
    for seq in questions:
        brain.add(seq)
    assert amounts(runner.step()) == {}
    assert set(amounts(runner.step())) == {"q0"}
    runner.run()
    assert runner.encoded == ["cat"]
    assert runner.computed_tokens == (33 + 1) + 9 * (33 - 32 + 1)
    assert [seq.output_ids for seq in questions] == [answer(seq) for seq in questions]
    assert {seq.cached_tokens for seq in questions[1:]} == {32}


@pytest.mark.parametrize("step", [16, 7, 3, 1])
def test_an_image_that_ends_inside_a_block_is_computed_once_to_its_last_token(step: int) -> None:
    """A prefix of 33 tokens is 8 blocks and one row. The row is copied, for every size of chunks."""
    brain = scheduler(blocks=200, max_step_tokens=step, max_running=16)
    runner = SlotRunner(brain)
    questions = [sequence(f"q{i}", [1, 2, ("cat", 31), 50 + i, 9], arrival=i, max_tokens=2) for i in range(5)]
    for seq in questions:
        brain.add(seq)
    plans = runner.run()
    assert [seq.output_ids for seq in questions] == [answer(seq) for seq in questions]
    assert {seq.cached_tokens for seq in questions[1:]} == {33}
    assert runner.computed_tokens == 35 + 1 + 4 * (2 + 1)
    assert sum(len(plan.moves) for plan in plans) == 4


def test_parts_of_blocks_differ_by_their_images_and_salts() -> None:
    brain = scheduler(blocks=200)
    runner = SlotRunner(brain)
    questions = [
        sequence("a", [("cat", 6), 1], max_tokens=2),
        sequence("b", [("dog", 6), 2], arrival=1, max_tokens=2),
        sequence("c", [("cat", 6), 3], arrival=2, max_tokens=2, salt="other"),
        sequence("d", [7, ("cat", 5), 3], arrival=3, max_tokens=2),
    ]
    for seq in questions:
        brain.add(seq)
        assert not any(plan.moves for plan in runner.run())
    assert [seq.output_ids for seq in questions] == [answer(seq) for seq in questions]


def test_a_request_that_waits_for_a_prefix_lets_others_pass() -> None:
    brain = scheduler(max_step_tokens=24)
    runner = SlotRunner(brain)
    brain.add(sequence("first", [1] * 30, arrival=0))
    runner.step()
    brain.add(sequence("follower", [1] * 30, arrival=1))
    brain.add(sequence("other", [2] * 3, arrival=2))
    assert set(amounts(runner.step())) == {"first", "other"}
    runner.run()


def test_a_follower_goes_on_alone_when_its_leader_is_cancelled() -> None:
    brain = scheduler(max_step_tokens=8)
    runner = SlotRunner(brain)
    leader, follower = sequence("leader", [1] * 30), sequence("follower", [1] * 30, arrival=1, max_tokens=3)
    brain.add(leader)
    brain.add(follower)
    runner.step()
    brain.finish(leader, "abort")
    runner.run()
    assert follower.output_ids == answer(follower)


def test_choices_of_one_prompt_share_its_blocks() -> None:
    brain = scheduler(blocks=20)
    runner = SlotRunner(brain)
    choices = [sequence(f"r:{i}", [1, ("cat", 14), 2], max_tokens=3) for i in range(4)]
    for seq in choices:
        brain.add(seq)
    runner.run()
    assert runner.encoded == ["cat"]
    assert runner.computed_tokens == 16 + 2 + 3 * (1 + 2)
    assert all(seq.output_ids == answer(seq) for seq in choices)


def test_the_latest_arrival_is_preempted_and_loses_time_but_no_text() -> None:
    brain = scheduler(blocks=6)
    runner = SlotRunner(brain)
    old = sequence("old", [1] * 6, arrival=0, max_tokens=16)
    new = sequence("new", [2] * 6, arrival=1, max_tokens=16)
    brain.add(old)
    brain.add(new)
    preempted = [name for plan in runner.run() for name in plan.preempted]
    assert set(preempted) == {"new"}
    assert brain.preemptions == new.preemptions == len(preempted) > 0
    assert (old.preemptions, old.output_ids, new.output_ids) == (0, answer(old), answer(new))
    assert brain.kv.pool.used == 0


def test_a_preempted_prompt_returns_its_share_of_the_budget() -> None:
    """Its tokens leave the plan, and an image that only this prompt waited for is not encoded."""
    brain = scheduler(blocks=4, max_step_tokens=64)
    runner = SlotRunner(brain)
    old = sequence("old", [1] * 7, arrival=0, max_tokens=8)
    brain.add(old)
    runner.step()
    new = sequence("new", [2, ("cat", 5)], arrival=1, max_tokens=1)
    brain.add(new)
    runner.run()
    assert (old.output_ids, new.output_ids) == (answer(old), answer(new))


def test_a_preempted_decode_is_removed_from_the_plan() -> None:
    """Decodes are planned first, so a late decode is in the plan when an older prompt needs its blocks."""
    brain = scheduler(blocks=6, block_size=2, max_step_tokens=3)
    runner = SlotRunner(brain)
    young = sequence("young", [3], arrival=9, max_tokens=9)
    brain.add(young)
    runner.step()
    runner.step()
    old = sequence("old", [1, 1, 1, 1, ("cat", 2), 1, 1], arrival=1, max_tokens=2)
    brain.add(old)
    plans = runner.run()
    hit = [plan for plan in plans if plan.preempted]
    assert [plan.preempted for plan in hit] == [("young",)]
    assert all(work.seq is not young for work in hit[0].work)
    assert (old.output_ids, young.output_ids) == (answer(old), answer(young))


def test_ending_twice_or_while_waiting_is_no_error() -> None:
    brain = scheduler()
    seq = sequence("a", 3)
    brain.add(seq)
    brain.finish(seq, "abort")
    brain.finish(seq, "length")
    assert (seq.finish_reason, brain.idle) == ("abort", True)
    brain.check_integrity()


def test_deadlines_are_compared_with_the_time_that_is_passed_in() -> None:
    brain = scheduler()
    late, never = sequence("late", 3, deadline=5.0), sequence("never", 3)
    brain.add(late)
    brain.add(never)
    assert brain.expired(4.9) == []
    assert brain.expired(5.0) == [late]


def test_an_update_does_not_change_a_sequence_that_has_ended() -> None:
    brain = scheduler()
    seq = sequence("a", 3)
    brain.add(seq)
    plan = brain.schedule()
    brain.finish(seq, "abort")
    brain.update(plan, {"a": [7]})
    assert seq.output_ids == []
    assert brain.kv.pool.used == 0


@pytest.mark.parametrize("embed_bytes", [0, 10, 15, 1000])
def test_two_images_with_room_for_one_or_none(embed_bytes: int) -> None:
    """Neither image may evict the other while a sequence reads it, and there is never a deadlock."""
    brain = scheduler(embed_bytes=embed_bytes, max_step_tokens=6, max_step_visual_tokens=5)
    runner = SlotRunner(brain)
    questions: list[Sequence] = []
    for i in range(4):
        questions.append(sequence(f"s{i}", [i, ("cat", 5), i, ("dog", 5), i], arrival=i, max_tokens=2))
        brain.add(questions[-1])
    runner.run(200)
    assert [seq.output_ids for seq in questions] == [answer(seq) for seq in questions]
    assert brain.embeddings.bytes <= embed_bytes


def test_a_refund_returns_tokens_and_images_that_no_other_sequence_waits_for() -> None:
    brain = scheduler(max_step_tokens=10, max_step_visual_tokens=20)
    leaves, stays = sequence("leaves", [("cat", 4), ("dog", 3)]), sequence("stays", [("cat", 4)])
    budget = Budget(10, brain.config.max_step_visual_tokens)
    budget.work = {"leaves": Work(leaves, 0, 7), "stays": Work(stays, 0, 2)}
    budget.tokens, budget.visual = 1, 13
    budget.jobs = {
        "cat": EncodeJob(leaves.spans[0], ["leaves", "stays"]),
        "dog": EncodeJob(leaves.spans[1], ["leaves"]),
    }
    budget.refund(leaves)
    assert (budget.tokens, budget.visual) == (8, 16)
    assert set(budget.work) == {"stays"}
    assert {key: job.holders for key, job in budget.jobs.items()} == {"cat": ["stays"]}


def test_an_encoder_output_is_released_when_the_last_of_its_tokens_is_computed() -> None:
    """It is not held until the answer ends: a long answer would keep megabytes in use for nothing."""
    brain = scheduler(embed_bytes=0, max_step_tokens=4)
    runner = SlotRunner(brain)
    brain.add(sequence("a", [1, ("cat", 6), 2, 3], max_tokens=5))
    sizes = []
    while not brain.idle:
        runner.step()
        sizes.append(brain.embeddings.bytes)
    assert sizes == [10, 10, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("policy", ["dual", "detail", "priority"])
def test_an_encode_only_request_is_served_while_others_keep_arriving(policy: str) -> None:
    """Without room, only the first sequences of the policy's order were searched, and text came before it."""
    brain = scheduler(policy=policy, max_running=2, blocks=400)
    runner = SlotRunner(brain)
    ahead = sequence("ahead", [("cat", 6)], arrival=0)
    ahead.encode_only = True
    for i in range(60):
        brain.add(sequence(f"t{i}", [i], arrival=-100 + i, max_tokens=1))
    brain.add(ahead)
    for i in range(200):
        brain.add(sequence(f"u{i}", [i], arrival=1 + i, max_tokens=1))
        runner.step()
        if ahead.status is Status.FINISHED:
            break
    assert ahead.status is Status.FINISHED


@pytest.mark.parametrize("policy", ["detail", "priority"])
def test_the_oldest_image_is_encoded_although_smaller_ones_keep_arriving(policy: str) -> None:
    brain = scheduler(policy=policy, max_step_visual_tokens=20)
    runner = SlotRunner(brain, slices=lambda: 2)
    large = sequence("large", [("cat", 15), 1], arrival=0, max_tokens=1)
    large.priority = 1
    brain.add(large)
    for i in range(40):
        brain.add(sequence(f"s{i}", [(f"small{i}", 10), i], arrival=1 + i, max_tokens=1))
        runner.step()
        if large.status is Status.FINISHED:
            break
    assert large.status is Status.FINISHED


def test_an_image_that_occurs_twice_is_held_until_its_second_span() -> None:
    brain = scheduler(max_step_tokens=5, embed_bytes=0)
    runner = SlotRunner(brain)
    seq = sequence("a", [1, ("cat", 4), 2, ("cat", 4), 3], max_tokens=2)
    brain.add(seq)
    runner.run()
    assert runner.encoded == ["cat"]
    assert seq.output_ids == answer(seq)


def test_of_images_asked_about_at_once_the_first_answer_delays_no_other() -> None:
    brain = scheduler(max_step_tokens=8)
    runner = SlotRunner(brain)
    burst = [sequence(f"cat{n}", [("cat", 4), n], arrival=n, max_tokens=20) for n in range(3)]
    text = sequence("text", [50, 51], arrival=3, max_tokens=20)
    for seq in (*burst, text):
        brain.add(seq)
    while not burst[0].output_ids or brain.decodes == len(burst) + 1:
        runner.step()
    waiting = [seq for seq in (*burst, text) if not seq.decoding]
    assert waiting, "all of them got their first token in one step"
    assert brain.streams_to_protect == sum(seq.decoding for seq in (text,)), (
        "the ITL limit keeps the rhythm of text against all others"
    )
    while len(brain.running) < 4 or brain.decodes < 4:
        runner.step()
    assert brain.streams_to_protect == 4, "no request waits for its first token"
    brain.add(sequence("late", [("dog", 4), 1], arrival=9))
    assert brain.streams_to_protect == 4, "they got their first tokens before it arrived"


def test_a_target_holds_for_all_sequences() -> None:
    brain = scheduler(max_step_tokens=8, target_itl_ms=10)
    runner = SlotRunner(brain)
    for n in range(3):
        brain.add(sequence(f"cat{n}", [("cat", 4), n], arrival=n, max_tokens=20))
    while not brain.decodes:
        runner.step()
    assert brain.decodes < 3
    assert brain.streams_to_protect == brain.decodes


def test_nobody_waits_for_the_end_of_an_image_that_gets_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that leaves out tokens names no rows after its point, so others must not wait for them."""
    monkeypatch.setattr(brains, "BLOCK_SIZE", 16)
    brain = scheduler(blocks=200, block_size=16, max_step_tokens=2048)
    runner = SlotRunner(brain)
    prompt = [*range(100), ("cat", 35), *range(100, 190)]  # the image ends after the point, in its block
    kept = sequence("kept", prompt, max_tokens=50, keep=KeepRule("snap", tokens=128))
    brain.add(kept)
    for _ in range(4):
        runner.step()
    other = sequence("other", [*prompt, 5, 6, 7], max_tokens=3, arrival=1)
    brain.add(other)
    for _ in range(6):
        runner.step()
    assert other.finish_reason == "length"
    runner.run()
    assert [seq.output_ids for seq in (kept, other)] == [answer(kept), answer(other)]


def test_a_sequence_joins_only_with_blocks_for_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was admitted with the blocks of another one, had none for its copies, and was preempted 31 times."""
    monkeypatch.setattr(brains, "BLOCK_SIZE", 16)
    brain = scheduler(blocks=14, block_size=16, max_step_tokens=2048)
    runner = SlotRunner(brain)
    whole = sequence("whole", [*range(128)], max_tokens=64)
    kept = sequence("kept", [*range(128), 7, 8, 9], arrival=1, keep=KeepRule("snap", tokens=128))
    brain.add(whole)
    runner.step()
    brain.add(kept)
    runner.run()
    assert brain.preemptions <= 1
    assert [seq.output_ids for seq in (kept, whole)] == [answer(kept), answer(whole)]


def test_drafts_stop_before_a_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brains, "BLOCK_SIZE", 16)
    for count in (1, 5, 40):
        brain = scheduler(blocks=64, block_size=16, max_step_tokens=512)

        def guess(seq: Sequence, new: list[int], count: int = count) -> list[int]:
            first = len(seq.output_ids) + len(new)
            return answer(seq)[first : first + count]

        runner = SlotRunner(brain, drafts=guess)
        seq = sequence("a", 120, max_tokens=90, keep=KeepRule("snap", tokens=128))
        brain.add(seq)
        steps = len(runner.run())
        assert seq.output_ids == answer(seq)
        assert steps < 90, "drafts save steps"
