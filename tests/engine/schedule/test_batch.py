"""Tests of the bound on running sequences that keeps decodes within a target, on simulated machines."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.engine.schedule.batch import DecodeBound


def settle(bound: DecodeBound, fixed_s: float, each_s: float, *, crowd: int = 64, noise: float = 0.0) -> int:
    """Observe 1,500 steps, and return how many sequences may run then.

    A step with n decodes takes fixed_s + n * each_s seconds; n is what the bound allows, at most `crowd`.
    noise: largest random addition to a duration, as a share of it.
    """
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
def test_the_bound_settles_where_decodes_take_about_the_target(
    fixed_s: float, each_s: float, target_s: float, noise: float
) -> None:
    allowed = settle(DecodeBound(target_s, 64), fixed_s, each_s, noise=noise)
    # At times the bound tries one increment more, and takes it back.
    settled = max(1, allowed - max(1, allowed // 10))
    assert settled == 1 or fixed_s + settled * each_s <= target_s * 1.001
    one_more = fixed_s + (allowed + max(1, allowed // 10)) * each_s
    assert allowed == 64 or one_more > 0.7 * target_s, "more sequences would have fitted"


def test_the_bound_grows_again_when_decodes_become_quick() -> None:
    bound = DecodeBound(0.05, 64)
    assert settle(bound, 0.01, 0.01) <= 4
    assert settle(bound, 0.001, 0.0001) == 64


def test_steps_with_few_decodes_do_not_change_the_bound() -> None:
    bound = DecodeBound(0.05, 64)
    settle(bound, 0.01, 0.004)
    before = bound.allowed()
    assert settle(bound, 0.01, 0.004, crowd=1) == before


def test_the_time_of_prompts_and_images_does_not_shrink_the_batch() -> None:
    bound = DecodeBound(0.05, 64)
    for _ in range(100):
        bound.observe(8, 0.080, 0.039)
        bound.observe(8, 2.0, 1.9)
    assert bound.allowed() == 64


def test_at_least_one_sequence_may_run() -> None:
    assert settle(DecodeBound(0.001, 8), 1.0, 0.1) == 1


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_without_a_target_there_is_no_bound(seconds: float) -> None:
    bound = DecodeBound(0.0, 8)
    for _ in range(50):
        bound.observe(8, seconds, 0.0)
    assert bound.allowed() == 8
