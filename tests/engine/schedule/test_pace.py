"""What a step may do beside its decodes, on made-up machines."""

from __future__ import annotations

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.engine.schedule.pace import CROWDING, FEWEST_TOKENS, FIRST_TOKENS, LISTEN_S, Pace


def taught(pace: float = 3.0, target_s: float = 0.0, decode_s: float = 0.02, token_s: float = 0.0005) -> Pace:
    made = Pace(pace, target_s, 2048)
    for _ in range(40):
        made.observe(1, 0, decode_s, 0.0)
        made.observe(1, 64, decode_s + 64 * token_s, 0.0)
    return made


def test_before_anything_is_measured_a_step_ends_in_time_to_hear_what_arrives() -> None:
    pace = Pace(3.0, 0.0, 2048)
    assert pace.prompt_tokens(4, 4, encoding=True) == FIRST_TOKENS
    assert pace.encode_s(4, 4, FIRST_TOKENS) == LISTEN_S


def test_a_step_may_take_the_pace_times_its_decodes() -> None:
    pace = taught()
    assert pace.prompt_tokens(1, 1, encoding=False) == pytest.approx(80, abs=3)
    assert pace.prompt_tokens(1, 1, encoding=True) == pytest.approx(40, abs=2)
    assert pace.encode_s(1, 1, 40) == pytest.approx(0.02, rel=0.05)
    assert pace.encode_s(1, 1, 0) == pytest.approx(0.04, rel=0.05), (
        "without prompts the encoder has all of it"
    )


def test_a_target_bounds_it_when_it_is_shorter() -> None:
    assert taught(target_s=0.025).prompt_tokens(1, 1, encoding=False) == FEWEST_TOKENS
    assert taught(pace=0.0, target_s=0.12).prompt_tokens(1, 1, encoding=False) == pytest.approx(200, abs=6)
    assert taught(pace=0.0).encode_s(1, 1, 100) == math.inf


def test_without_decodes_a_step_ends_in_time_to_hear_what_arrives() -> None:
    assert taught().prompt_tokens(0, 3, encoding=True) == pytest.approx(2 * LISTEN_S / 0.0005, rel=0.1)
    assert taught().encode_s(0, 3, 0) == LISTEN_S


def test_a_target_that_decodes_alone_miss_still_lets_prompts_advance() -> None:
    pace = taught(target_s=0.001)
    assert pace.prompt_tokens(1, 1, encoding=True) == FEWEST_TOKENS
    assert pace.encode_s(1, 1, FEWEST_TOKENS) == 0.0  # and the runner does one slice


def test_where_more_wait_than_read_the_bound_grows_and_a_target_still_holds() -> None:
    assert taught().spare_s(1, 2) == pytest.approx((3 - 1) * 0.02, rel=0.05)
    assert taught().spare_s(1, 7) == pytest.approx((3 * 6**CROWDING - 1) * 0.02, rel=0.05)
    assert taught().spare_s(8, 9) == pytest.approx((3 * 4**CROWDING - 1) * 0.02, rel=0.05)
    assert taught().spare_s(8, 1) == pytest.approx((3 - 1) * 0.02, rel=0.05)
    assert taught(target_s=0.1).spare_s(1, 7) == pytest.approx(0.08, rel=0.05)


def test_the_nearest_batch_stands_in_for_one_that_was_not_measured() -> None:
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
    """A machine that it has never seen, measured with noise: steps come to last about three times a decode."""
    rng = random.Random(seed)
    pace = Pace(3.0, 0.0, 2048)
    pace.observe(1, 0, decode_s, 0.0)
    took = 0.0
    for _ in range(60):
        tokens = pace.prompt_tokens(1, 1, encoding=False)
        took = (decode_s + tokens * token_s) * (1 + rng.uniform(-noise, noise))
        pace.observe(1, tokens, took, 0.0)
    if FEWEST_TOKENS < tokens < 2048:
        assert took <= 3 * decode_s * (1 + 2.5 * noise) + 2 * token_s
        assert took >= 3 * decode_s * (1 - 2.5 * noise) * 0.8 - 2 * token_s


def test_a_server_that_never_only_decodes_is_paced_all_the_same() -> None:
    """Loaded from its first request on it has a prompt in every step, and there was no bound at all."""
    pace = Pace(3.0, 0.0, 2048)
    for _ in range(50):
        tokens = min(200, pace.prompt_tokens(4, 4, encoding=False))
        pace.observe(4, tokens, 0.02 + 0.0005 * tokens, 0.0)
    assert pace.prompt_tokens(4, 4, encoding=False) < 400
    pace.observe(4, 0, 0.02, 0.0)
    assert pace.decode_s(4) == 0.02, "the first step that only decodes takes the place of what was guessed"


def test_a_target_holds_before_anything_is_measured() -> None:
    assert Pace(3.0, 0.05, 2048).encode_s(2, 1, 0) == 0.05
