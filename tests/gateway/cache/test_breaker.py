"""Pauses after failures: how long they are, and who may call meanwhile."""

from __future__ import annotations

from fovea.gateway.cache.redis import Breaker


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_call_per_pause_and_longer_pauses() -> None:
    clock = Clock()
    breaker = Breaker(0.5, 5.0, clock)
    assert breaker.allows()
    calls = []
    breaker.failed()
    for tick in range(300):
        clock.now = tick / 10
        if breaker.allows():
            calls.append(clock.now)
            breaker.failed()
    assert calls == [0.5, 1.5, 3.5, 7.5, 12.5, 17.5, 22.5, 27.5]
    assert breaker.trips == 1


def test_calls_that_fail_together_count_as_one_failure() -> None:
    clock = Clock()
    breaker = Breaker(0.5, 5.0, clock)
    for _ in range(100):
        breaker.failed()
    clock.now = 0.5
    assert breaker.allows()
    assert not breaker.allows(), "only one call tries whether the service works again"


def test_a_success_ends_the_pause() -> None:
    clock = Clock()
    breaker = Breaker(0.5, 5.0, clock)
    breaker.failed()
    clock.now = 1.0
    assert breaker.allows()
    breaker.succeeded()
    assert not breaker.failing
    assert all(breaker.allows() for _ in range(3))
    breaker.failed()
    assert breaker.trips == 2


def test_a_trial_that_never_ends_does_not_stop_the_next_one() -> None:
    clock = Clock()
    breaker = Breaker(0.5, 5.0, clock)
    breaker.failed()
    clock.now = 0.5
    assert breaker.allows()
    clock.now = 1.1
    assert breaker.allows()
