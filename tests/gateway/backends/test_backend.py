"""A backend's state: who may be sent to it, how much it has outstanding, and its weight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.gateway.backends.backend import CONNECT, LEAST_SHARE, TEXT, VISION, Load
from fovea.gateway.settings import ResilienceSettings
from tests.gateway.samples import backend

TIMES = st.floats(0, 100)


@given(
    st.booleans(), st.booleans(), st.booleans(), st.booleans(), TIMES, TIMES,
    st.tuples(*[st.integers(0, 6)] * 3), TIMES, st.booleans(),
)  # fmt: skip
def test_accepts_and_why_not_agree(
    healthy: bool, draining: bool, itself: bool, removed: bool, ejected: float, busy: float,
    failures: tuple[int, int, int], now: float, vision: bool,
) -> None:  # fmt: skip
    one = backend("a")
    one.healthy, one.draining, one.drains_itself, one.removed = healthy, draining, itself, removed
    one.ejected_until, one.busy_until = ejected, busy
    for stage, times in zip((CONNECT, TEXT, VISION), failures, strict=True):
        for _ in range(times):
            one.breakers[stage].fail(10.0)
    assert one.accepts(now, vision=vision) == (one.why_not(now, vision=vision) == "")
    sent = healthy and not (draining or itself or removed) and now >= max(ejected, busy)
    if not sent or max(failures) < 5:
        assert one.accepts(now, vision=vision) == sent


def test_every_reason_has_a_word() -> None:
    one = backend("a")
    words = [one.why_not(0.0, vision=False)]
    for _ in range(5):
        one.breakers[TEXT].fail(0.0)
    words.append(one.why_not(0.0, vision=False))
    one.busy_until = 1.0
    words.append(one.why_not(0.0, vision=False))
    one.ejected_until = 1.0
    words.append(one.why_not(0.0, vision=False))
    one.draining = True
    words.append(one.why_not(0.0, vision=False))
    one.healthy = False
    words.append(one.why_not(0.0, vision=False))
    assert words == ["", "breaker open", "busy", "ejected", "draining", "unhealthy"]


def test_images_that_fail_do_not_stop_texts() -> None:
    one = backend("a")
    for _ in range(5):
        one.breakers[VISION].fail(0.0)
    assert one.accepts(0.0, vision=False)
    assert not one.accepts(0.0, vision=True)
    for _ in range(5):
        one.breakers[CONNECT].fail(0.0)
    assert not one.accepts(0.0, vision=False)


@given(st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 999)), max_size=20), st.randoms())
def test_outstanding_work_returns_to_nothing(loads: list[tuple[int, int]], random: object) -> None:
    one = backend("a")
    begun = [Load(text, visual) for text, visual in loads]
    for load in begun:
        one.begin(load, 0.0, vision=bool(load.visual))
    assert one.requests == len(begun)
    assert one.tokens == sum(load.tokens for load in begun)
    random.shuffle(begun)  # type: ignore[attr-defined]
    for load in begun:
        one.end(load)
    assert (one.requests, one.text, one.visual, one.tokens) == (0, 0, 0, 0)


def test_a_backend_that_came_back_grows_to_its_weight() -> None:
    one = backend("a", weight=4.0)
    assert one.weight(0.0) == 4.0
    one.come_back(100.0)
    weights = [one.weight(100.0 + seconds) for seconds in range(0, 40, 3)]
    assert weights[0] == 4.0 * LEAST_SHARE
    assert weights == sorted(weights)
    assert weights[-1] == 4.0
    assert one.weight(115.0) == pytest.approx(2.0)


def test_without_a_slow_start_the_weight_is_full_at_any_time() -> None:
    """An ejection sets the time of the return in the future, and its page shows the weight meanwhile."""
    one = backend("a", ResilienceSettings(slow_start_s=0))
    one.come_back(50.0)
    assert [one.weight(now) for now in (0.0, 50.0, 51.0)] == [1.0, 1.0, 1.0]
    late = backend("a")
    late.come_back(50.0)
    assert late.weight(0.0) == LEAST_SHARE


def test_failed_checks_in_a_row_take_it_out() -> None:
    one = backend("a")
    assert not one.note_check(0.0, passed=True)
    assert not one.note_check(1.0, passed=False)
    assert one.healthy
    assert one.note_check(2.0, passed=False)
    assert not one.healthy
    assert not one.note_check(3.0, passed=False)
    assert one.note_check(40.0, passed=True)
    assert one.accepts(40.0, vision=False)
    assert one.weight(40.0) == LEAST_SHARE


def test_a_pass_between_failed_checks_keeps_it() -> None:
    one = backend("a")
    for passed in (True, False, True, False, True, False):
        one.note_check(0.0, passed=passed)
    assert one.healthy


def test_a_backend_that_was_never_healthy_is_out_at_once() -> None:
    one = backend("a")
    assert one.note_check(0.0, passed=False)
    assert not one.healthy


def test_a_backend_that_has_ended_after_its_drain_gets_no_request() -> None:
    """The story: the first refused connection ended the drain, so requests went to a dead engine."""
    one = backend("a")
    one.note_check(0.0, passed=True)
    one.note_check(1.0, passed=False, draining=True)
    for second in (2.0, 3.0, 4.0):
        one.note_check(second, passed=False)
        assert not one.accepts(second, vision=False)
    one.note_check(5.0, passed=True)
    assert one.accepts(5.0, vision=False)


def test_a_backend_that_drains_itself_is_not_broken() -> None:
    one = backend("a")
    one.note_check(0.0, passed=True)
    for _ in range(5):
        one.note_check(1.0, passed=False, draining=True)
    assert one.healthy
    assert one.why_not(1.0, vision=False) == "draining"
    one.note_check(50.0, passed=True)
    assert one.accepts(50.0, vision=False)
    assert one.weight(50.0) == LEAST_SHARE  # it has restarted, so its caches are cold


def test_times_to_the_first_byte() -> None:
    one = backend("a")
    for seconds in (1.0, 3.0, 2.0):
        one.note_first_byte(seconds)
    assert one.median_first_byte(4) is None
    assert one.median_first_byte(3) == 2.0
    for _ in range(1000):
        one.note_first_byte(5.0)
    assert len(one.first_bytes) == 64
    one.come_back(0.0)
    assert one.median_first_byte(0 + 1) is None
