"""How many may run so that tokens come in time, on made-up machines."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.engine.schedule.batch import DecodeBound


def settle(bound: DecodeBound, fixed_s: float, each_s: float, *, crowd: int = 64, noise: float = 0.0) -> int:
    """Steps of a machine whose decodes take fixed_s + n * each_s, with as many as may run and come."""
    rng = random.Random(7)
    for _ in range(1500):
        decodes = min(crowd, bound.allowed())
        bound.observe(decodes, (fixed_s + decodes * each_s) * (1 + noise * rng.random()), 0.0)
    return bound.allowed()


@given(
    fixed_s=st.floats(0.001, 0.02),
    each_s=st.floats(0.0002, 0.02),
    target_s=st.floats(0.03, 0.1),
    noise=st.sampled_from([0.0, 0.1]),
)
def test_it_settles_where_decodes_take_about_the_target(
    fixed_s: float, each_s: float, target_s: float, noise: float
) -> None:
    allowed = settle(DecodeBound(target_s, 64), fixed_s, each_s, noise=noise)
    # It tries one step more at times, and takes it back.
    tried = max(1, allowed - max(1, allowed // 10))
    assert tried == 1 or fixed_s + tried * each_s <= target_s * 1.001
    one_more = fixed_s + (allowed + max(1, allowed // 10)) * each_s
    assert allowed == 64 or one_more > 0.7 * target_s, "more would have fitted"


def test_it_grows_again_when_decodes_are_quick_again() -> None:
    bound = DecodeBound(0.05, 64)
    assert settle(bound, 0.01, 0.01) <= 4
    assert settle(bound, 0.001, 0.0001) == 64


def test_few_that_decode_say_nothing_about_many() -> None:
    bound = DecodeBound(0.05, 64)
    settle(bound, 0.01, 0.004)
    before = bound.allowed()
    assert settle(bound, 0.01, 0.004, crowd=1) == before


def test_what_prompts_and_images_took_is_not_the_batchs_fault() -> None:
    bound = DecodeBound(0.05, 64)
    for _ in range(100):
        bound.observe(8, 0.080, 0.039)
        bound.observe(8, 2.0, 1.9)
    assert bound.allowed() == 64


def test_one_always_runs() -> None:
    assert settle(DecodeBound(0.001, 8), 1.0, 0.1) == 1


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_without_a_target_there_is_no_bound(seconds: float) -> None:
    bound = DecodeBound(0.0, 8)
    for _ in range(50):
        bound.observe(8, seconds, 0.0)
    assert bound.allowed() == 8
