"""Tests of token buckets: what they let through in any time, and that a promised wait is enough."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from fovea.access.bucket import MINUTE, TokenBucket
from tests.core.test_ledger import Clock
from tests.support.thorough import examples

STEPS = st.lists(st.tuples(st.floats(0, 90), st.integers(1, 60)), max_size=60)
"""Seconds that pass, and the amount that is taken then."""


def test_a_minutes_worth_may_come_at_once_and_then_the_rate_holds() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert [bucket.take(1) for _ in range(60)] == [0.0] * 60
    assert bucket.take(1) == 1.0
    assert (bucket.remaining, bucket.reset_s) == (0, 60.0)
    clock.now += 1.0
    assert bucket.take(1) == 0.0
    clock.now += 1000.0
    assert (bucket.remaining, bucket.reset_s) == (60, 0.0)


def test_a_charge_may_leave_a_debt_that_is_paid_before_the_next_take() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.charge(150)
    assert (bucket.level, bucket.remaining) == (-90.0, 0)
    assert bucket.take(1) == 91.0
    clock.now += 91.0
    assert bucket.take(1) == 0.0
    bucket.charge(-500)
    assert bucket.remaining == 60, "what is given back never fills it beyond a minute's worth"


def test_an_amount_larger_than_the_bucket_is_taken_when_it_is_full() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert bucket.take(600) == 0.0
    assert bucket.take(600) == 600.0
    clock.now += 600.0
    assert bucket.take(600) == 0.0


def test_the_used_share_stays_used_when_the_rate_changes() -> None:
    """Otherwise a client would get a full bucket whenever the keys file is written."""
    bucket = TokenBucket(60, Clock())
    bucket.charge(45)
    bucket.change_rate(600)
    assert (bucket.per_minute, bucket.remaining) == (600, 150)


@settings(max_examples=examples(200), deadline=None)
@given(rate=st.integers(1, 60), start=st.floats(0, 1e7), steps=STEPS)
def test_no_window_gets_more_than_its_rate_and_a_minutes_worth(
    rate: int, start: float, steps: list[tuple[float, int]]
) -> None:
    clock = Clock()
    clock.now = start
    bucket = TokenBucket(rate, clock)
    taken: list[tuple[float, int]] = []
    for passed, amount in steps:
        clock.now += passed
        amount = min(amount, rate)
        if bucket.take(amount) == 0.0:
            taken.append((clock.now, amount))
    for first in range(len(taken)):
        total = 0
        for time, amount in taken[first:]:
            total += amount
            assert total <= rate + rate * (time - taken[first][0]) / MINUTE + 1e-3


@settings(max_examples=examples(200), deadline=None)
@given(rate=st.integers(1, 10_000), start=st.floats(0, 1e7), steps=STEPS, charged=st.integers(0, 50_000))
def test_waiting_as_long_as_promised_is_enough(
    rate: int, start: float, steps: list[tuple[float, int]], charged: int
) -> None:
    clock = Clock()
    clock.now = start
    bucket = TokenBucket(rate, clock)
    for passed, amount in steps:
        clock.now += passed
        bucket.take(amount)
    bucket.charge(charged)
    for amount in (1, rate, 3 * rate):
        wait = bucket.wait_s(amount)
        clock.now += wait
        assert bucket.take(amount) == 0.0
