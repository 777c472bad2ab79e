"""Scaling: within bounds, at once upward, slowly downward, and never back and forth under a constant load."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.cluster.scaling import Decision, Scaler, ScaleSettings, Signals
from fovea.core.errors import ConfigError

SETTINGS = ScaleSettings(replicas_min=1, replicas_max=10, scale_down_s=60)
ONE = st.builds(
    Signals,
    st.floats(0, 1e4),
    st.floats(0, 1e4),
    st.integers(0, 1000),
    st.none() | st.floats(0, 1),
    st.sampled_from([0.0, 8.0, 64.0]),
)
MOMENTS = st.lists(st.tuples(st.floats(0, 100), st.lists(ONE, max_size=5), st.integers(0, 20)), max_size=30)


@given(MOMENTS, st.integers(0, 5), st.integers(5, 12))
def test_a_decision_is_within_bounds_or_moves_toward_them(
    moments: list[tuple[float, list[Signals], int]], least: int, most: int
) -> None:
    scaler = Scaler(ScaleSettings(replicas_min=least, replicas_max=most))
    now = 0.0
    for wait, signals, replicas in moments:
        now += wait
        wanted, reason = scaler.decide(now, signals, replicas)
        assert reason
        assert min(replicas, least) <= wanted <= max(replicas, most)
        if replicas < least:
            assert wanted >= least
        if replicas > most:
            assert wanted <= most


@given(st.floats(0, 200), st.integers(0, 500), st.floats(0, 3), st.none() | st.floats(0, 1))
def test_a_constant_load_never_makes_it_turn_round(
    work: float, requests: int, oldest: float, good: float | None
) -> None:
    """The load is divided among the replicas, which answer as soon as they are wanted."""
    scaler, replicas, moves = Scaler(ScaleSettings(replicas_max=1000, scale_down_s=30)), 20, []
    for tick in range(200):
        rest, each = requests % replicas, requests // replicas
        signals = [
            Signals(work / replicas, oldest, each + (number < rest), good, 8.0) for number in range(replicas)
        ]
        wanted = scaler.decide(5.0 * tick, signals, replicas).replicas
        moves.append(wanted - replicas)
        replicas = wanted
    assert min(moves) >= 0 or max(moves) <= 0


@given(st.integers(1, 9), st.floats(1.01, 50))
def test_work_that_waits_is_answered_within_one_period(replicas: int, load: float) -> None:
    scaler = Scaler(SETTINGS)
    signals = [Signals(load * SETTINGS.target_queue_s, in_flight=1)] * replicas
    wanted, reason = scaler.decide(0.0, signals, replicas)
    assert wanted > replicas
    assert wanted == min(10, math.ceil(load * replicas - 1e-9), max(2 * replicas, replicas + 1))
    assert "s of work wait" in reason


def test_an_engine_full_of_answers_with_an_empty_queue_is_not_removed() -> None:
    scaler = Scaler(SETTINGS)
    busy = [Signals(in_flight=30, places=64.0)] * 4
    for tick in range(50):
        assert scaler.decide(10.0 * tick, busy, 4).replicas == 4
    full = [Signals(in_flight=60, places=64.0)] * 4
    assert scaler.decide(1000.0, full, 4) == Decision(7, "240 of 256 places are taken")


def test_fewer_are_enough_only_after_a_while() -> None:
    scaler = Scaler(SETTINGS)
    low = [Signals(in_flight=2, places=64.0)] * 4
    assert scaler.decide(0.0, low, 4).replicas == 4
    assert scaler.decide(59.0, low, 4).replicas == 4
    assert scaler.decide(60.0, low, 4).replicas == 3
    assert scaler.decide(61.0, low[:3], 3).replicas == 3
    assert scaler.decide(90.0, [Signals(5.0)] * 3, 3).replicas == 6
    assert scaler.decide(125.0, low, 4).replicas == 4  # the load between them started the wait anew


def test_the_last_replica_goes_only_when_nothing_is_in_flight() -> None:
    scaler = Scaler(ScaleSettings(replicas_min=0, replicas_max=4, scale_down_s=0))
    assert scaler.decide(0.0, [Signals(in_flight=1, places=64.0)], 1).replicas == 1
    assert scaler.decide(1.0, [Signals()], 1).replicas == 0


def test_replicas_that_start_are_not_asked_for_again() -> None:
    scaler = Scaler(ScaleSettings(replicas_max=100))
    late = [Signals(0.1, oldest_s=9.0, in_flight=5)] * 4
    assert scaler.decide(0.0, late, 4).replicas == 5
    for tick in range(1, 50):  # the fifth loads its weights, and the requests wait on
        assert scaler.decide(10.0 * tick, late, 5).replicas == 5
    flood = [Signals(1000.0, oldest_s=9.0, in_flight=300)] * 4
    assert scaler.decide(600.0, flood, 5).replicas == 8
    assert scaler.decide(610.0, flood, 8).replicas == 8
    assert scaler.decide(620.0, [*flood, *flood], 8).replicas == 16


def test_late_answers_ask_for_one_more_only_if_requests_share_a_replica() -> None:
    late = [Signals(in_flight=3, good=0.5, places=64.0)] * 2
    assert Scaler(SETTINGS).decide(0.0, late, 2) == Decision(3, "50% of answers keep their targets")
    alone = [Signals(in_flight=1, good=0.5, places=64.0)] * 2
    assert Scaler(SETTINGS).decide(0.0, alone, 2).replicas == 2


def test_additions_keep_their_distance() -> None:
    scaler = Scaler(ScaleSettings(replicas_max=100, scale_up_s=5))
    assert scaler.decide(0.0, [Signals(9.0)] * 2, 2).replicas == 4
    wanted, reason = scaler.decide(1.0, [Signals(9.0)] * 4, 4)
    assert wanted == 4
    assert "waits for the latest addition" in reason
    assert scaler.decide(5.0, [Signals(9.0)] * 4, 4).replicas == 8


def test_without_signals_nothing_changes_but_toward_the_bounds() -> None:
    assert Scaler(SETTINGS).decide(0.0, [], 3).replicas == 3
    assert Scaler(SETTINGS).decide(0.0, [], 0).replicas == 1
    assert Scaler(SETTINGS).decide(0.0, [], 12) == Decision(
        10, "no replica answers yet; bounded by replicas_max"
    )


def test_the_signals_of_an_engine() -> None:
    stats = {
        "queued_work_seconds": 3.0,
        "queued_encode_seconds": 2.0,
        "oldest_waiting_image_seconds": 1.5,
        "oldest_waiting_ready_seconds": 0.5,
        "requests_waiting": 4.0,
        "requests_waiting_image": 3.0,
        "requests_running": 6.0,
        "sequences_allowed": 64.0,
    }
    assert Signals.of_stats(stats, good=0.9) == Signals(3.0, 1.5, 10, 0.9, 64.0)
    assert Signals.of_stats(stats, "encode") == Signals(2.0, 1.5, 3)
    assert Signals.of_stats(stats, "answer") == Signals(1.0, 0.5, 10, None, 64.0)
    assert Signals.of_stats({}) == Signals()


def test_bounds_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="replicas_min is 3, above replicas_max"):
        ScaleSettings(replicas_min=3, replicas_max=2)
