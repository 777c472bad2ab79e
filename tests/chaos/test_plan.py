"""The plan of faults is a pure function of seed, connection and window."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos.plan import KINDS, SHARE, Window, plan
from tests.chaos.timeline import Episode, timeline

SEEDS, NUMBERS, KIND = st.integers(0, 1 << 32), st.integers(1, 1 << 20), st.sampled_from(KINDS)


@given(SEEDS, NUMBERS, NUMBERS, KIND)
@settings(max_examples=60)
def test_equal_arguments_give_an_equal_fault_within_its_ranges(
    seed: int, connection: int, number: int, kind: str
) -> None:
    window = Window(number, kind)
    fault = plan(seed, connection, window)
    assert fault == plan(seed, connection, Window(number, kind))
    assert plan(seed, connection, None) is None
    if fault is not None:
        assert fault.kind == kind
        assert 0 <= fault.after_bytes <= 3163
        assert 0 <= fault.delay_s <= 0.4
        assert 0 <= fault.jitter_s <= 0.3
        if kind.startswith("flip"):
            assert fault.direction == kind.removeprefix("flip-")


def test_about_the_stated_share_of_connections_gets_a_fault_and_seeds_differ() -> None:
    def chosen(seed: int) -> list[bool]:
        return [plan(seed, number, Window(1, "reset")) is not None for number in range(1000)]

    assert abs(sum(chosen(1)) / 1000 - SHARE) < 0.06
    assert chosen(1) != chosen(2)


def test_a_kept_connection_gets_a_new_decision_in_each_window() -> None:
    faults = {plan(1, 1, Window(number, "latency")) for number in range(20)}
    assert len(faults) > 5


def test_an_unknown_kind_of_window_is_refused() -> None:
    with pytest.raises(ValueError, match="accepted: latency, slices"):
        Window(1, "meteor")


@given(SEEDS, st.floats(0, 100), st.floats(0, 2000), st.integers(1, 40))
@settings(max_examples=60)
def test_episodes_follow_each_other_within_their_time(
    seed: int, begin_s: float, length_s: float, count: int
) -> None:
    kinds = [f"kind {number}" for number in range(count)]
    episodes = timeline(seed, begin_s, begin_s + length_s, kinds)
    assert episodes == timeline(seed, begin_s, begin_s + length_s, kinds)
    assert [each.number for each in episodes] == list(range(len(episodes)))
    ends = [begin_s, *(each.end_s for each in episodes)]
    assert all(end <= each.begin_s < each.end_s for end, each in zip(ends, episodes, strict=False))
    assert ends[-1] <= begin_s + length_s + 1e-6
    for start in range(0, len(episodes) - count + 1, count):
        assert {each.kind for each in episodes[start : start + count]} == set(kinds)


def test_a_fault_disturbs_requests_of_its_time_and_shortly_after() -> None:
    episode = Episode(0, "kill engine", 10.0, 19.0)
    assert episode.may_disturb(5.0, 10.5)
    assert episode.may_disturb(20.0, 21.0)
    assert not episode.may_disturb(5.0, 9.0)
    assert not episode.may_disturb(40.0, 41.0)
