"""Tests of the pace: how much a step may do beside its decodes, on simulated machines."""

from __future__ import annotations

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.engine.schedule.pace import CROWDING, FEWEST_TOKENS, FIRST_TOKENS, IDLE_STEP_S, Pace


def trained_pace(
    pace: float = 3.0, target_s: float = 0.0, decode_s: float = 0.02, token_s: float = 0.0005
) -> Pace:
    trained = Pace(pace, target_s, 2048)
    for _ in range(40):
        trained.observe(1, 0, decode_s, 0.0)
        trained.observe(1, 64, decode_s + 64 * token_s, 0.0)
    return trained


def test_before_the_first_measurement_a_step_is_short_for_the_sake_of_new_requests() -> None:
    pace = Pace(3.0, 0.0, 2048)
    assert pace.prompt_tokens(4, 4, encoding=True) == FIRST_TOKENS
    assert pace.encode_s(4, 4, FIRST_TOKENS) == IDLE_STEP_S


def test_a_step_may_take_the_pace_times_its_decodes() -> None:
    pace = trained_pace()
    assert pace.prompt_tokens(1, 1, encoding=False) == pytest.approx(80, abs=3)
    assert pace.prompt_tokens(1, 1, encoding=True) == pytest.approx(40, abs=2)
    assert pace.encode_s(1, 1, 40) == pytest.approx(0.02, rel=0.05)
    assert pace.encode_s(1, 1, 0) == pytest.approx(0.04, rel=0.05), (
        "without prompts the encoder gets all of the time"
    )


def test_a_target_bounds_a_step_when_it_is_shorter_than_the_pace() -> None:
    assert trained_pace(target_s=0.025).prompt_tokens(1, 1, encoding=False) == FEWEST_TOKENS
    assert trained_pace(pace=0.0, target_s=0.12).prompt_tokens(1, 1, encoding=False) == pytest.approx(
        200, abs=6
    )
    assert trained_pace(pace=0.0).encode_s(1, 1, 100) == math.inf


def test_without_decodes_a_step_is_short_for_the_sake_of_new_requests() -> None:
    assert trained_pace().prompt_tokens(0, 3, encoding=True) == pytest.approx(
        2 * IDLE_STEP_S / 0.0005, rel=0.1
    )
    assert trained_pace().encode_s(0, 3, 0) == IDLE_STEP_S


def test_prompts_advance_even_if_decodes_alone_miss_the_target() -> None:
    pace = trained_pace(target_s=0.001)
    assert pace.prompt_tokens(1, 1, encoding=True) == FEWEST_TOKENS
    assert pace.encode_s(1, 1, FEWEST_TOKENS) == 0.0  # the runner computes one slice anyway


def test_the_bound_grows_when_more_requests_wait_than_decode_and_a_target_still_holds() -> None:
    assert trained_pace().spare_s(1, 2) == pytest.approx((3 - 1) * 0.02, rel=0.05)
    assert trained_pace().spare_s(1, 7) == pytest.approx((3 * 6**CROWDING - 1) * 0.02, rel=0.05)
    assert trained_pace().spare_s(8, 9) == pytest.approx((3 * 4**CROWDING - 1) * 0.02, rel=0.05)
    assert trained_pace().spare_s(8, 1) == pytest.approx((3 - 1) * 0.02, rel=0.05)
    assert trained_pace(target_s=0.1).spare_s(1, 7) == pytest.approx(0.08, rel=0.05)


def test_an_unmeasured_batch_size_uses_the_nearest_measured_one() -> None:
    pace = Pace(3.0, 0.0, 2048)
    pace.observe(1, 0, 0.01, 0.0)
    pace.observe(32, 0, 0.05, 0.0)
    assert pace.decode_s(2) == 0.01
    assert pace.decode_s(24) == 0.05


@given(
    token_s=st.floats(1e-5, 1e-2),
    decode_s=st.floats(1e-3, 0.2),
    noise=st.floats(0, 0.3),
    seed=st.integers(0, 5),
)
def test_mixed_steps_settle_at_the_bound(token_s: float, decode_s: float, noise: float, seed: int) -> None:
    """On an unknown machine with noise, steps settle at about three times the duration of a decode."""
    rng = random.Random(seed)
    pace = Pace(3.0, 0.0, 2048)
    pace.observe(1, 0, decode_s, 0.0)
    seconds = 0.0
    for _ in range(60):
        tokens = pace.prompt_tokens(1, 1, encoding=False)
        seconds = (decode_s + tokens * token_s) * (1 + rng.uniform(-noise, noise))
        pace.observe(1, tokens, seconds, 0.0)
    if FEWEST_TOKENS < tokens < 2048:
        assert seconds <= 3 * decode_s * (1 + 2.5 * noise) + 2 * token_s
        assert seconds >= 3 * decode_s * (1 - 2.5 * noise) * 0.8 - 2 * token_s


def test_a_server_without_steps_of_decodes_alone_is_paced() -> None:
    """Under load from the first request on, every step has a prompt.

    Such a server had no bound at all before.
    """
    pace = Pace(3.0, 0.0, 2048)
    for _ in range(50):
        tokens = min(200, pace.prompt_tokens(4, 4, encoding=False))
        pace.observe(4, tokens, 0.02 + 0.0005 * tokens, 0.0)
    assert pace.prompt_tokens(4, 4, encoding=False) < 400
    pace.observe(4, 0, 0.02, 0.0)
    assert pace.decode_s(4) == 0.02, "the first step that only decodes replaces the estimate"


def test_a_target_holds_before_anything_is_measured() -> None:
    assert Pace(3.0, 0.05, 2048).encode_s(2, 1, 0) == 0.05
