"""Tests of the costs of requests, and of the expected time of their first tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fovea.core.errors import Overloaded
from fovea.engine.config.schedule import ScheduleSettings
from fovea.engine.request.admission import PROBE, FirstTokenGate
from fovea.engine.schedule.first_tokens import (
    FIRST_FACTOR,
    Expectation,
    FirstTokens,
    LodCost,
    LodCosts,
    total,
)
from fovea.engine.schedule.itl_limit import ItlLimit
from fovea.engine.schedule.step_times import ImageTimes, StepTimes
from fovea.engine.sequence import Status
from fovea.planner.cost import Composition
from tests.support.brains import scheduler, sequence

TOKEN_S, IMAGE_S = 0.001, 0.01


class Situation:
    """A scheduler without a runner, predictions of a machine with known costs, and the expectations.

    A token of a prompt takes TOKEN_S seconds, a row of an image IMAGE_S, a decode 0.02 in all.
    """

    def __init__(self, target_s: float = 1.0, *, target_itl_s: float = 0.0, policy: str = "dual") -> None:
        self.scheduler = scheduler(blocks=256, policy=policy)
        times, images = StepTimes(95), ImageTimes()
        for tokens in [10, 0, 100, 40, 500] * 60:
            step = Composition(1, 10, tokens, tokens > 0, tokens * (tokens + 1) // 2)
            times.observe(step, 0.02 + tokens * TOKEN_S)
        for rows in [4, 16, 64] * 50:
            images.observe(rows, rows * IMAGE_S)
        self.costs = LodCosts(times, images, self.scheduler.embeddings.__contains__)
        limit = ItlLimit(2.0, target_itl_s, 2048, times)
        self.first = FirstTokens(self.scheduler, limit, self.costs, lambda: 8, target_s)

    def enter(self, name: str, prompt: int | list[int | tuple[str, int]], arrival: float = 0.0) -> None:
        seq = sequence(name, prompt, arrival=arrival)
        self.first.enter(seq, arrival, self.first.expect(seq))


def test_the_cost_has_the_encoder_and_the_prompt_apart() -> None:
    cost = Situation().costs.remaining(sequence("a", [1, 2, ("cat", 64), 3]), 0)
    assert cost.encode_s == {"cat": pytest.approx(64 * IMAGE_S, rel=0.1)}
    assert cost.prompt_s == pytest.approx(67 * TOKEN_S, rel=0.2)
    assert (cost.visual_tokens, cost.prompt_tokens, cost.ready) == (64, 67, False)
    assert "images to encode: 1, in 0.6" in cost.reason
    assert "tokens of the prompt: 67, 64 of them visual" in cost.reason


def test_an_encoded_image_and_computed_tokens_cost_nothing() -> None:
    situation = Situation()
    situation.scheduler.embeddings.put("cat", "features", 8, set())
    seq = sequence("a", [1, 2, ("cat", 64), 3])
    assert situation.costs.remaining(seq, 0).ready
    late = situation.costs.remaining(seq, 66)
    assert (late.prompt_tokens, late.visual_tokens, late.encode_s) == (1, 0, {})
    assert situation.costs.remaining(seq, 67) == LodCost()
    assert situation.costs.remaining(seq, 34).visual_tokens == 32


def test_requests_that_share_an_image_pay_for_it_once() -> None:
    costs = [LodCost(0.1, {"cat": 1.0}, {"cat": 0.2}), LodCost(0.1, {"cat": 1.0, "dog": 2.0}, {"cat": 0.2})]
    both = total(costs)
    assert both.seconds == pytest.approx(0.2 + 3.0 + 0.2)


def test_before_anything_is_measured_no_request_is_late() -> None:
    brain = scheduler()
    times = StepTimes()
    costs = LodCosts(times, ImageTimes(), brain.embeddings.__contains__)
    first = FirstTokens(brain, ItlLimit(2.5, 0.0, 2048, times), costs, lambda: 8, 1.0)
    expected = first.expect(sequence("a", [("cat", 500)]))
    assert not expected.late(0.001)


def test_the_work_of_earlier_requests_comes_first() -> None:
    situation = Situation()
    alone = situation.first.expect(sequence("new", 200))
    for name in "abc":
        situation.enter(name, 200)
    behind = situation.first.expect(sequence("new", 200))
    assert behind.ahead.seconds == pytest.approx(3 * 200 * TOKEN_S, rel=0.2)
    assert behind.seconds == pytest.approx(alone.seconds + behind.ahead.seconds, rel=0.05)
    assert "ahead: 0." in behind.reason
    assert situation.first.queued.seconds == pytest.approx(behind.ahead.seconds)
    situation.first.leave("a")
    situation.first.leave("nobody")
    assert situation.first.expect(sequence("new", 200)).seconds < behind.seconds


def test_a_short_prompt_shares_the_time_with_longer_ones() -> None:
    """A request was refused as late because of long prompts that it does not wait for."""
    situation = Situation()
    alone = situation.first.expect(sequence("new", 20))
    for name in "abc":
        situation.enter(name, 2000)
    situation.enter("d", 20)
    behind = situation.first.expect(sequence("new", 20))
    assert behind.seconds - alone.seconds == pytest.approx(3 * alone.cost.seconds, rel=0.05)


def test_without_a_target_nobody_adds_up_a_long_queue() -> None:
    situation = Situation(target_s=0.0)
    situation.enter("a", 200)
    expected = situation.first.expect(sequence("new", 50))
    assert (expected.ahead, expected.idle) == (LodCost(), False)
    assert situation.first.queued.prompt_tokens == 200


def test_ready_requests_do_not_wait_for_images_of_others_unless_the_policy_says_so() -> None:
    for policy, waits in (("dual", False), ("fcfs", True)):
        situation = Situation(policy=policy)
        situation.enter("image", [1, ("cat", 64), 2])
        expected = situation.first.expect(sequence("text", 50))
        assert (expected.seconds > 64 * IMAGE_S) == waits


def test_decodes_leave_a_share_of_the_time() -> None:
    situation = Situation()
    running = sequence("running", 4, max_tokens=50)
    running.append([1])
    running.computed_tokens, running.status = 4, Status.RUNNING
    situation.scheduler.running.append(running)
    expected = situation.first.expect(sequence("new", 100))
    assert expected.share == pytest.approx(0.5, rel=0.1), "a pace of 2 doubles the time of the decodes"
    assert expected.seconds == pytest.approx(2 * 100 * TOKEN_S + 0.04, rel=0.2)


def test_progress_lowers_the_work_ahead() -> None:
    situation = Situation()
    situation.enter("a", 200)
    seq = sequence("a", 200)
    seq.status, seq.computed_tokens = Status.RUNNING, 150
    situation.first.attach(seq)
    situation.first.attach(sequence("unknown", 5))
    assert situation.first.queued.prompt_tokens == 50


def test_a_request_is_late_by_experience() -> None:
    situation = Situation(target_s=1.0)
    for number in range(80):
        situation.enter("big", 500, arrival=float(number))
        expected = situation.first._pending["big"].expected
        situation.first.observe("big", number + 1.5 * expected.seconds)
    expected = situation.first.expect(sequence("new", 500))
    assert expected.factor == pytest.approx(1.5, rel=0.05)
    situation.enter("ahead", 500)
    expected = situation.first.expect(sequence("new", 500))
    assert expected.seconds < 1.3
    assert expected.late(1.3)
    assert not expected.late(2.0)
    assert not expected.late(0.0)


def test_far_earlier_first_tokens_are_no_experience() -> None:
    situation = Situation(target_s=1.0)
    situation.enter("small", 10)
    situation.first.observe("small", 5.0)
    assert situation.first.expect(sequence("new", 500)).factor == FIRST_FACTOR


def test_on_an_idle_engine_only_the_own_work_makes_a_request_late() -> None:
    expected = Situation().first.expect(sequence("new", 500))
    assert expected.idle
    assert not replace(expected, factor=100.0).late(0.7)
    assert expected.late(0.3)


def test_turns_count_when_as_many_run_as_may() -> None:
    situation = Situation()
    for number in range(8):
        running = sequence(str(number), 4, max_tokens=50)
        running.append([1])
        running.computed_tokens, running.status = 4, Status.RUNNING
        situation.scheduler.running.append(running)
        situation.first.observe(str(number), 10.0 * number)
    assert situation.first.expect(sequence("new", 5)).seconds > 10, "one place becomes free every 10 s"
    before = situation.first.expect(sequence("new", 5)).seconds
    situation.first.rest()
    situation.first.observe("the next morning", 30_000.0)
    assert situation.first.expect(sequence("new", 5)).seconds == before, "an idle night is no turn"


def test_after_a_stall_the_requests_that_enter_correct_the_factor() -> None:
    situation = Situation(target_s=2.0)
    for number in range(4):
        situation.enter("big", 900, arrival=float(number))
        situation.first.observe("big", number + 30.0)
    stalled = situation.first.expect(sequence("new", 100)).factor
    assert stalled > 8
    for number in range(100):
        situation.enter("small", 100, arrival=float(number))
        expected = situation.first._pending["small"].expected
        assert not replace(expected, idle=False).late(2.0 * stalled)
        situation.first.observe("small", number + expected.seconds)
    assert situation.first.expect(sequence("new", 900)).factor == pytest.approx(1.0, rel=0.05)


def test_steps_that_are_expected_to_take_no_time_leave_all_of_it_for_prompts() -> None:
    brain, times = scheduler(), StepTimes()
    times.observe(Composition(0, 0, 8, 1, 36), 0.1)
    times._fit.costs = [0.0] * 6
    running = sequence("running", 4, max_tokens=50)
    running.append([1])
    running.computed_tokens, running.status = 4, Status.RUNNING
    brain.running.append(running)
    costs = LodCosts(times, ImageTimes(), brain.embeddings.__contains__)
    first = FirstTokens(brain, ItlLimit(2.5, 0.0, 2048, times), costs, lambda: 8, 1.0)
    assert first.expect(sequence("new", 5)).share == 1.0


class Gate:
    """A gate whose requests have one expectation: on an idle engine or beside others."""

    def __init__(self, seconds: float, factor: float, *, idle: bool) -> None:
        situation = Situation()
        self.gate = FirstTokenGate(situation.first, ScheduleSettings(target_ttft_ms=1000))
        self.expected = Expectation(seconds, factor, LodCost(seconds), LodCost(), 1.0, idle=idle)

    def enters(self) -> bool:
        try:
            self.gate.enter(sequence("new", 5), self.expected, 0)
        except Overloaded:
            return False
        return True


@pytest.mark.parametrize(("seconds", "factor", "idle"), [(0.5, 100.0, False), (60.0, 1.0, True)])
def test_a_wrong_expectation_does_not_refuse_for_ever(seconds: float, factor: float, idle: bool) -> None:
    requests = Gate(seconds, factor, idle=idle)
    entered = [requests.enters() for _ in range(2 * PROBE + 2)]
    assert entered == [*[False] * PROBE, True] * 2
    assert requests.gate.refused == 2 * PROBE


def test_no_request_enters_behind_a_queue_that_is_too_long() -> None:
    requests = Gate(2.0, 1.0, idle=False)
    assert not any(requests.enters() for _ in range(3 * PROBE))
