"""Arithmetic of results: latencies, percentiles, rates and the bounds of a good answer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.bench.measure import Bounds, Failure, Round, Spread, Summary, by_label
from tests.bench.support import sample

REFUSED = Failure("http 429", "full")


def test_sample_counts_from_the_due_time() -> None:
    late = sample(3.0, 3.5, 4.5, due_at=1.0, sent_at=2.0)
    assert (late.ttft, late.end_to_end, late.send_delay) == (2.0, 3.5, 1.0)
    assert late.gaps == [0.5, 1.0]
    assert late.output_tokens == 3
    assert late.tpot == 0.75


def test_usage_overrides_the_number_of_events() -> None:
    packed = sample(1.0, 2.0, tokens=5)
    assert packed.output_tokens == 5
    assert packed.tpot == 0.25, "four tokens after the first in one second"


@pytest.mark.parametrize("short", [sample(), sample(1.0), sample(1.0, tokens=4)])
def test_one_event_has_no_time_per_token(short: object) -> None:
    assert math.isnan(short.tpot)  # type: ignore[attr-defined]


def test_spread_is_in_milliseconds_and_ignores_nan() -> None:
    spread = Spread.of([math.nan, *(n / 1000 for n in range(1, 101))])
    assert (spread.count, spread.p50, spread.p90, spread.p95, spread.p99, spread.longest) == (
        100, 50.0, 90.0, 95.0, 99.0, 100.0,
    )  # fmt: skip
    assert Spread.of([]).count == 0
    assert math.isnan(Spread.of([]).p50)


@given(st.lists(st.floats(0, 1e3), min_size=1))
def test_percentiles_are_monotonic(seconds: list[float]) -> None:
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
def test_good_means_within_every_bound(bounds: Bounds, good: bool) -> None:
    assert bounds.good(sample(1.0, 1.3, 2.0)) is good


def test_failed_request_is_never_good() -> None:
    assert not Bounds().good(sample(1.0, failure=REFUSED))


def test_missing_values_break_no_bound() -> None:
    assert Bounds(tpot_ms=1, gap_ms=1).good(sample(1.0))


def test_summary() -> None:
    rounds = [
        Round(
            [sample(1.0, 2.0, requested_tokens=2), sample(2.0, 4.0, requested_tokens=3)], {"stall_ms": 5.0}
        ),
        Round([sample(1.0, 2.0, requested_tokens=2), sample(failure=REFUSED)], {"stall_ms": 7.0}),
    ]
    summary = Summary.of(rounds, Bounds(end_to_end_ms=2000))
    assert (summary.requests, summary.failed, summary.errors) == (4, 1, {"http 429": (1, "full")})
    assert summary.seconds == 6.0, "four seconds in the first round, two in the second"
    assert (summary.tokens, summary.tokens_per_s) == (6, 1.0)
    assert (summary.tokens_per_s_low, summary.tokens_per_s_high) == (1.0, 1.0)
    assert (summary.good, summary.goodput, summary.requests_per_s) == (0.5, pytest.approx(2 / 6), 0.5)
    assert summary.decode_per_s == 1.0
    assert summary.short == 1
    assert not summary.counted
    assert summary.values == {"stall_ms": 6.0}
    assert summary.ttft.count == 3
    assert summary.image_tokens is None


def test_empty_summary_has_no_nan_in_json() -> None:
    for rounds in ([], [Round([])], [Round([sample(failure=REFUSED)])]):
        summary = Summary.of(rounds, Bounds()).as_dict()
        assert summary["tokens_per_s"] is None
        assert summary["ttft"]["p50"] is None


def test_usage_is_summed_over_answers_that_have_it() -> None:
    known = [sample(1.0, tokens=1, image_tokens=4, prompt_tokens=9, images=1) for _ in range(2)]
    summary = Summary.of([Round([*known, sample(1.0, tokens=1)])], Bounds())
    assert (summary.image_tokens, summary.prompt_tokens, summary.images) == (8, 18, 2)
    assert summary.counted


def test_by_label_keeps_rounds_apart() -> None:
    rounds = [
        Round([sample(1.0, label="text"), sample(2.0, label="new image")]),
        Round([sample(3.0, label="text")]),
    ]
    by_class = by_label(rounds)
    assert list(by_class) == ["text", "new image"]
    assert [len(part.samples) for part in by_class["new image"]] == [1, 0]
    assert Summary.of(by_class["new image"], Bounds()).requests == 1
