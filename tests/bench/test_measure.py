"""The arithmetic: latencies, percentiles, rates, what is good."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.bench.measure import Bounds, Round, Spread, Summary, by_label
from fovea.bench.sample import Failure
from tests.bench.support import sample

GONE = Failure("http 429", "full")


def test_a_sample_counts_from_when_it_was_due() -> None:
    late = sample(3.0, 3.5, 4.5, scheduled=1.0, sent=2.0)
    assert (late.ttft, late.end_to_end, late.late) == (2.0, 3.5, 1.0)
    assert late.gaps == [0.5, 1.0]
    assert late.output == 3
    assert late.tpot == 0.75


def test_tokens_are_the_servers_where_it_counts_them() -> None:
    packed = sample(1.0, 2.0, tokens=5)
    assert packed.output == 5
    assert packed.tpot == 0.25, "four tokens after the first in one second"


@pytest.mark.parametrize("short", [sample(), sample(1.0), sample(1.0, tokens=4)])
def test_one_piece_of_text_has_no_time_per_token(short: object) -> None:
    assert math.isnan(short.tpot)  # type: ignore[attr-defined]


def test_spreads_are_in_milliseconds_and_leave_out_what_is_not_there() -> None:
    spread = Spread.of([math.nan, *(n / 1000 for n in range(1, 101))])
    assert (spread.count, spread.p50, spread.p90, spread.p95, spread.p99, spread.longest) == (
        100, 50.0, 90.0, 95.0, 99.0, 100.0,
    )  # fmt: skip
    assert Spread.of([]).count == 0
    assert math.isnan(Spread.of([]).p50)


@given(st.lists(st.floats(0, 1e3), min_size=1))
def test_percentiles_never_fall(seconds: list[float]) -> None:
    spread = Spread.of(seconds)
    assert spread.p50 <= spread.p90 <= spread.p95 <= spread.p99 <= spread.longest == max(seconds) * 1e3


@pytest.mark.parametrize(
    ("bounds", "good"),
    [
        (Bounds(), True),
        (Bounds(ttft_ms=1000), True),
        (Bounds(ttft_ms=999), False),
        (Bounds(tpot_ms=500), True),
        (Bounds(tpot_ms=499), False),
        (Bounds(gap_ms=700), True),
        (Bounds(gap_ms=699), False),
        (Bounds(end_to_end_ms=2000), True),
        (Bounds(end_to_end_ms=1999), False),
        (Bounds(ttft_ms=1000, end_to_end_ms=1), False),
    ],
)
def test_good_is_within_every_bound(bounds: Bounds, good: bool) -> None:
    assert bounds.good(sample(1.0, 1.3, 2.0)) is good


def test_what_failed_is_never_good() -> None:
    assert not Bounds().good(sample(1.0, failure=GONE))


def test_what_is_too_short_to_have_gaps_keeps_bounds_on_them() -> None:
    assert Bounds(tpot_ms=1, gap_ms=1).good(sample(1.0))


def test_a_summary() -> None:
    rounds = [
        Round([sample(1.0, 2.0, wanted=2), sample(2.0, 4.0, wanted=3)], {"stall_ms": 5.0}),
        Round([sample(1.0, 2.0, wanted=2), sample(failure=GONE)], {"stall_ms": 7.0}),
    ]
    found = Summary.of(rounds, Bounds(end_to_end_ms=2000))
    assert (found.requests, found.failed, found.errors) == (4, 1, {"http 429": (1, "full")})
    assert found.seconds == 6.0, "four and two"
    assert (found.tokens, found.tokens_per_s) == (6, 1.0)
    assert (found.tokens_per_s_low, found.tokens_per_s_high) == (1.0, 1.0)
    assert (found.good, found.goodput, found.requests_per_s) == (0.5, pytest.approx(2 / 6), 0.5)
    assert found.decode_per_s == 1.0
    assert found.short == 1
    assert not found.counted
    assert found.values == {"stall_ms": 6.0}
    assert found.ttft.count == 3
    assert found.image_tokens is None


def test_nothing_at_all_is_a_summary_too_and_json_has_no_nan() -> None:
    for rounds in ([], [Round([])], [Round([sample(failure=GONE)])]):
        found = Summary.of(rounds, Bounds()).as_dict()
        assert found["tokens_per_s"] is None
        assert found["ttft"]["p50"] is None


def test_usage_is_added_up_where_there_is_any() -> None:
    known = [sample(1.0, tokens=1, image_tokens=4, prompt_tokens=9, images=1) for _ in range(2)]
    found = Summary.of([Round([*known, sample(1.0, tokens=1)])], Bounds())
    assert (found.image_tokens, found.prompt_tokens, found.images) == (8, 18, 2)
    assert found.counted


def test_classes_keep_their_rounds() -> None:
    rounds = [
        Round([sample(1.0, label="text"), sample(2.0, label="new image")]),
        Round([sample(3.0, label="text")]),
    ]
    found = by_label(rounds)
    assert list(found) == ["text", "new image"]
    assert [len(part.samples) for part in found["new image"]] == [1, 0]
    assert Summary.of(found["new image"], Bounds()).requests == 1
