"""Circuit breakers open after failures in a row, probe once, and close by a success."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.gateway.breaker import Breaker, State


def failed(times: int, now: float = 0.0) -> Breaker:
    breaker = Breaker(5, 30.0)
    for _ in range(times):
        breaker.begin(now)
        breaker.fail(now)
    return breaker


def test_the_fifth_failure_in_a_row_opens() -> None:
    breaker = Breaker(5, 30.0)
    assert [breaker.fail(1.0) for _ in range(5)] == [False, False, False, False, True]
    assert breaker.state(1.0) is State.OPEN
    assert not breaker.allows(30.9)


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = failed(4)
    breaker.succeed()
    assert not breaker.fail(1.0)
    assert breaker.allows(1.0)
    assert breaker.state(1.0) is State.CLOSED


def test_one_request_probes_at_a_time() -> None:
    breaker = failed(5)
    assert breaker.state(30.0) is State.HALF_OPEN
    assert breaker.allows(30.0)
    breaker.begin(30.0)
    assert not breaker.allows(31.0)


def test_a_lost_probe_is_forgotten() -> None:
    breaker = failed(5)
    breaker.begin(30.0)
    assert not breaker.allows(59.9)
    assert breaker.allows(60.0)
    breaker.begin(60.0)
    breaker.release()
    assert breaker.allows(60.1)


def test_a_probe_that_fails_opens_again() -> None:
    breaker = failed(5)
    breaker.begin(30.0)
    assert breaker.fail(31.0)
    assert not breaker.allows(60.9)
    assert breaker.allows(61.0)


def test_a_probe_that_succeeds_closes() -> None:
    breaker = failed(5)
    breaker.begin(30.0)
    breaker.succeed()
    assert breaker.state(30.0) is State.CLOSED
    for _ in range(10):
        breaker.begin(30.0)
        assert breaker.allows(30.0)


def test_late_failures_do_not_open_it_twice() -> None:
    breaker = failed(5)
    assert not breaker.fail(1.0)
    assert breaker.state(29.0) is State.OPEN


def test_it_opens_again_soon_after_a_late_success() -> None:
    """A request that was sent before closes the breaker; failures after it open it, and that is reported."""
    breaker = failed(5)
    breaker.succeed()
    assert [breaker.fail(2.0) for _ in range(5)] == [False] * 4 + [True]


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "succeed", "fail", "release"]), st.floats(0, 20)), max_size=60
)


@given(STEPS, st.integers(1, 4))
def test_state_and_permission_agree(steps: list[tuple[str, float]], most: int) -> None:
    breaker, now, row = Breaker(most, 30.0), 0.0, 0
    for step, pause in steps:
        now += pause
        before = breaker.state(now)
        if step == "fail":
            opens = breaker.fail(now)
            row += 1
            assert opens == (before is not State.OPEN and row >= most)
        elif step == "succeed":
            breaker.succeed()
            row = 0
        elif step == "begin":
            breaker.begin(now)
            if before is State.HALF_OPEN:
                assert not breaker.allows(now)
        else:
            breaker.release()
        state = breaker.state(now)
        assert (state is State.CLOSED) == (row < most)
        if state is not State.HALF_OPEN:
            assert breaker.allows(now) == (state is State.CLOSED)
        assert breaker.allows(now + 31.0)


@pytest.mark.parametrize("most", [1, 3])
def test_the_number_of_failures_is_a_setting(most: int) -> None:
    breaker = Breaker(most, 1.0)
    assert [breaker.fail(0.0) for _ in range(most)][-1]
    assert breaker.allows(1.0)


def test_pauses_grow_up_to_the_longest_while_probes_fail() -> None:
    breaker, calls = Breaker(1, 0.5, 5.0), []
    breaker.fail(0.0)
    for tick in range(300):
        now = tick / 10
        if breaker.allows(now):
            calls.append(now)
            breaker.begin(now)
            breaker.fail(now)
    assert calls == [0.5, 1.5, 3.5, 7.5, 12.5, 17.5, 22.5, 27.5]
    assert breaker.outages == 1
    assert breaker.succeed()
    assert not breaker.succeed(), "it was closed already"
    assert breaker.pause_s == 0.5
    breaker.fail(30.0)
    assert breaker.outages == 2


def test_calls_that_fail_together_do_not_make_the_pause_longer() -> None:
    breaker = Breaker(1, 0.5, 5.0)
    for _ in range(100):
        breaker.fail(0.0)
    assert breaker.pause_s == 0.5
    assert breaker.allows(0.5)
