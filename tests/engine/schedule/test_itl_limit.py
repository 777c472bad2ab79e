"""Tests of the ITL limit: how much a step may do beside its decodes, on simulated machines."""

from __future__ import annotations

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fovea.engine.schedule.itl_limit import (
    CROWDING,
    FEWEST_TOKENS,
    FIRST_TOKENS,
    IDLE_STEP_S,
    LATE_STEP,
    Allowance,
    ItlLimit,
    PromptBudget,
)
from fovea.engine.schedule.step_times import StepTimes
from fovea.planner.cost import Composition
from tests.support.thorough import examples

ONE = Composition(1, 100)
DECODE_S, TOKEN_S, CHUNK_S = 0.02, 0.0005, 0.001


def step_s(step: Composition) -> float:
    """The duration of a step on the simulated machine: decodes share most of their cost."""
    decodes = DECODE_S + 0.0001 * step.decodes if step.decodes else 0.0
    return decodes + TOKEN_S * step.prompt_tokens + CHUNK_S * step.chunks


def trained_limit(pace: float = 3.0, target_s: float = 0.0, percentile: float = 95) -> ItlLimit:
    trained = ItlLimit(pace, target_s, 2048, StepTimes(percentile))
    for tokens in [0, 16, 40, 100, 0, 400, 1000] * 40:
        for decodes in (1, 8):
            step = Composition(decodes, 100 * decodes, tokens, tokens > 0, tokens * tokens // 2)
            trained.times.observe(step, step_s(step))
    return trained


def prompt_tokens(limit: ItlLimit, allowance: Allowance, *, encoding: bool = False) -> int:
    return limit.prompt_budget(allowance, encoding=encoding).most(0, 4096)


def test_before_the_first_measurement_a_step_is_short_for_the_sake_of_new_requests() -> None:
    limit = ItlLimit(3.0, 0.0, 2048, StepTimes())
    allowance = limit.allow(Composition(4, 400), 4, 4)
    assert prompt_tokens(limit, allowance, encoding=True) == FIRST_TOKENS
    assert limit.encode_s(allowance, Composition(4, 400, FIRST_TOKENS, 1)) == IDLE_STEP_S


def test_a_target_holds_before_anything_is_measured() -> None:
    limit = ItlLimit(3.0, 0.05, 2048, StepTimes())
    assert limit.encode_s(limit.allow(Composition(2, 100), 2, 1), Composition(2, 100)) == 0.05


def test_a_step_may_take_the_pace_times_its_decodes() -> None:
    limit = trained_limit()
    allowance = limit.allow(ONE, 1, 1)
    assert (allowance.reason, allowance.forced) == ("pace", True)
    assert allowance.seconds == pytest.approx(0.06, rel=0.03)
    assert prompt_tokens(limit, allowance) == pytest.approx(78, abs=4)
    assert prompt_tokens(limit, allowance, encoding=True) == pytest.approx(38, abs=3)
    assert limit.encode_s(allowance, Composition(1, 100, 40, 1, 800)) == pytest.approx(0.019, rel=0.1)
    assert limit.encode_s(allowance, ONE) == pytest.approx(0.04, rel=0.05), (
        "without prompts the encoder gets all of the time"
    )


def test_without_a_bound_prompts_and_encoder_have_all_the_time() -> None:
    limit = trained_limit(pace=0.0)
    allowance = limit.allow(ONE, 1, 1)
    assert prompt_tokens(limit, allowance) == 2048
    assert limit.encode_s(allowance, ONE) == math.inf


def test_without_streams_to_protect_a_step_is_short_for_the_sake_of_new_requests() -> None:
    limit = trained_limit()
    allowance = limit.allow(Composition(), 0, 3)
    assert prompt_tokens(limit, allowance) == pytest.approx(2 * IDLE_STEP_S / TOKEN_S, rel=0.1)
    assert limit.encode_s(allowance, Composition()) == IDLE_STEP_S


def test_the_bound_grows_when_more_requests_wait_than_decode_and_a_target_still_holds() -> None:
    eight = Composition(8, 800)
    alone = DECODE_S + 0.0008
    assert trained_limit().allow(ONE, 1, 2).seconds == pytest.approx(3 * DECODE_S, rel=0.03)
    assert trained_limit().allow(ONE, 1, 7).seconds == pytest.approx(3 * 6**CROWDING * DECODE_S, rel=0.03)
    assert trained_limit().allow(eight, 8, 9).seconds == pytest.approx(3 * 4**CROWDING * alone, rel=0.03)
    assert trained_limit().allow(eight, 8, 1).seconds == pytest.approx(3 * alone, rel=0.03)
    assert trained_limit(target_s=0.1).allow(ONE, 1, 7).seconds <= 0.1


def test_with_a_target_the_scatter_of_durations_is_left_free() -> None:
    limit = trained_limit(target_s=0.05)
    for number in range(300):
        limit.times.observe(ONE, step_s(ONE) * (1.5 if number % 10 == 0 else 1.0))
    allowance = limit.allow(ONE, 1, 1)
    assert allowance.factor == pytest.approx(1.5, rel=0.1)
    assert allowance.seconds == pytest.approx(0.05 / allowance.factor)
    assert (allowance.reason, allowance.forced) == ("target", False)
    # The encoder stops by the clock, so it may use what the scatter of the tokens leaves of the target.
    tokens_s = limit.times.seconds(ONE)
    assert limit.encode_s(allowance, ONE) == pytest.approx(0.05 - allowance.factor * tokens_s)


def test_what_does_not_fit_into_the_target_advances_only_in_steps_that_may_be_late() -> None:
    limit = trained_limit(target_s=0.025)
    allowance = limit.allow(ONE, 1, 1)
    assert not allowance.forced
    assert prompt_tokens(limit, allowance) == 0
    for _ in range(30):
        limit.late_steps.observe(False)
    late = limit.allow(ONE, 1, 1)
    assert (late.forced, late.reason) == (True, "target, may be late")
    assert late.seconds <= LATE_STEP * 0.025
    assert prompt_tokens(limit, late) >= FEWEST_TOKENS


def test_a_slice_of_an_image_counts_as_what_has_to_fit() -> None:
    limit = trained_limit(target_s=0.04)
    for _ in range(30):
        limit.late_steps.observe(False)
    assert limit.allow(ONE, 1, 1).reason == "target"
    assert limit.allow(ONE, 1, 1, slice_s=0.03).reason == "target, may be late"


@pytest.mark.parametrize("allowance", [None, Allowance(math.inf, 0.02, 1.0, True, "pace")])
def test_a_whole_image_that_exceeds_the_budget_leaves_no_tokens(allowance: Allowance | None) -> None:
    budget = (
        PromptBudget(128) if allowance is None else trained_limit().prompt_budget(allowance, encoding=False)
    )
    budget.take(0, budget.tokens + 100)
    assert budget.most(0, 50) == 0


def test_a_target_that_one_decode_misses_is_ignored() -> None:
    limit = trained_limit(target_s=0.015)
    assert not limit.possible(ONE)
    assert not limit.possible(Composition(8, 800))
    allowance = limit.allow(ONE, 1, 1)
    assert (allowance.reason, allowance.forced) == ("pace", True)
    assert allowance.seconds == pytest.approx(0.06, rel=0.03)
    assert trained_limit(target_s=0.05).possible(Composition(1000, 10**5)), "fewer sequences keep it"


@settings(deadline=None, max_examples=examples(15))
@given(
    token_s=st.floats(1e-5, 1e-2),
    decode_s=st.floats(1e-3, 0.2),
    target=st.sampled_from([0.0, 4.0]),
    noise=st.floats(0, 0.3),
    seed=st.integers(0, 5),
)
def test_mixed_steps_settle_at_the_bound(
    token_s: float, decode_s: float, target: float, noise: float, seed: int
) -> None:
    """On an unknown machine with noise, no step of which only decodes, steps settle below the bound."""
    rng = random.Random(seed)
    limit = ItlLimit(0.0 if target else 3.0, target * decode_s, 2048, StepTimes(95))
    latest: list[float] = []
    for _ in range(400):
        allowance = limit.allow(ONE, 1, 1)
        tokens = prompt_tokens(limit, allowance)
        seconds = (decode_s + tokens * token_s) * rng.lognormvariate(0, noise)
        limit.times.observe(Composition(1, 100, tokens, tokens > 0, tokens * tokens // 2), seconds)
        latest.append(seconds)
    if FEWEST_TOKENS < tokens < 2048:
        middle = sorted(latest[200:])[100]
        bound = (target or 3.0) * decode_s
        assert middle <= bound * 1.15 + token_s
        if target:
            assert sum(s <= bound for s in latest[200:]) >= 0.88 * 200
