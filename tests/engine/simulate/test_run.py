"""Runs on the virtual clock: durations follow the costs, every request ends, none is passed too often."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fovea.core.trace import Trace, TraceRequest, Workload, generate
from fovea.engine.config import EngineConfig
from fovea.engine.config.schedule import POLICY_NAMES
from fovea.engine.schedule.itl_limit import BatchRule
from fovea.engine.simulate.run import Bounds, simulate
from fovea.planner.cost import Composition, CostModel
from tests.support.thorough import is_thorough

COST = CostModel(
    step_s=0.01, decode_s=0.001, context_s=0, token_s=1e-4, chunk_s=0, pair_s=0, between_s=0,
    image_s=0, visual_s=1e-3, visual_pair_s=0, slice_s=0.005, kv_token_bytes=1024, visual_token_bytes=1024,
)  # fmt: skip
FREE = EngineConfig.of(pace=0, max_queue=0)


def test_one_request_takes_the_time_of_its_steps() -> None:
    report = simulate((TraceRequest(2.0, 100, 5),), FREE, COST)
    first, decode = COST.step(Composition(prompt_tokens=100, chunks=1)), COST.step(Composition(1, 101))
    text = report.classes["text"]
    assert text.ttft.p50 == pytest.approx(1e3 * first)
    assert text.itl.longest == pytest.approx(1e3 * decode)
    assert text.end_to_end.p50 == pytest.approx(1e3 * (first + 4 * decode))
    assert report.seconds == pytest.approx(2.0 + first + 4 * decode)
    assert report.steps == 5
    assert report.busy == pytest.approx((first + 4 * decode) / report.seconds)


def test_an_image_is_encoded_once_and_cached_later() -> None:
    requests = tuple(TraceRequest(at, 10, 3, (("cat", 200),)) for at in (0.0, 5.0))
    report = simulate(requests, FREE, COST)
    new, cached = report.classes["new image"], report.classes["cached image"]
    # Two steps: the very first chunk is short, because step times are learnt from it.
    assert new.ttft.p50 == pytest.approx(1e3 * (COST.image(200) + 2 * 0.01 + 210e-4))
    assert cached.ttft.p50 < new.ttft.p50 / 5
    assert (report.images_encoded, report.images_spared) == (1, 0.5)
    assert report.prefix_hits == pytest.approx(192 / 420, abs=0.02)


def test_without_a_prefix_cache_the_encoder_output_is_a_hit() -> None:
    requests = tuple(TraceRequest(at, 10, 3, (("cat", 200),)) for at in (0.0, 5.0))
    report = simulate(requests, FREE.changed(prefix_cache=False), COST)
    assert report.encoder_hits == 0.5
    assert report.prefix_hits != report.prefix_hits or report.prefix_hits == 0


def test_a_pace_bounds_the_gap_that_an_image_causes() -> None:
    trace = (TraceRequest(0.0, 100, 200), TraceRequest(0.5, 10, 1, (("cat", 600),)))
    free, paced = (simulate(trace, FREE.changed(pace=pace), COST) for pace in (0, 3.0))
    assert free.classes["text"].itl.longest > 600
    assert paced.classes["text"].itl.longest < 4 * 11
    assert paced.classes["new image"].ttft.p50 > free.classes["new image"].ttft.p50, (
        "the image takes longer in return"
    )


def test_a_timeout_ends_a_request_and_frees_it() -> None:
    trace = (TraceRequest(0.0, 10, 1000, timeout=0.5), TraceRequest(1.0, 10, 5))
    report = simulate(trace, FREE, COST)
    assert report.timeouts == 1
    assert report.classes["all"].finished == 1


def test_requests_that_cannot_be_served_are_refused() -> None:
    too_long = TraceRequest(0.0, COST.max_context, 1)
    assert simulate((too_long,), FREE, COST).refused == 1
    small = FREE.changed(max_running=1, max_queue=2)
    crowd = tuple(TraceRequest(0.0, 10, 5) for _ in range(10))
    report = simulate(crowd, small, COST)
    assert (report.refused, report.classes["all"].finished) == (7, 3)


def test_goodput_counts_answers_within_both_bounds() -> None:
    trace = tuple(TraceRequest(10.0 * n, 100, 5) for n in range(4))
    first, decode = 0.02, 0.011
    seconds = simulate(trace, FREE, COST).seconds
    for bounds, good in (
        (Bounds(first * 1.01, decode * 1.01), 4),
        (Bounds(first * 0.99, decode * 1.01), 0),
        (Bounds(first * 1.01, decode * 0.99), 0),
    ):
        report = simulate(trace, FREE, COST, bounds=bounds)
        assert report.goodput == pytest.approx(good / seconds)
        assert report.classes["all"].good == good / 4
    assert simulate(trace, FREE, COST, bounds=Bounds(1, decode * 0.99)).classes["all"].gaps_within == 0


def test_the_same_trace_gives_the_same_report() -> None:
    load = Workload(requests=150, rate=8, seed=11)
    assert simulate(generate(load), FREE, COST) == simulate(generate(load), FREE, COST)


def test_thousands_of_requests_share_their_steps() -> None:
    number = 2000 if is_thorough() else 1000
    report = simulate(generate(Workload(requests=number, rate=60, output_tokens=16)), FREE, CostModel())
    assert report.classes["all"].finished == number
    assert report.steps < report.tokens_per_s * report.seconds / 2, "requests did not run together"


def test_the_batch_rule_moves_by_two_between_one_and_its_maximum() -> None:
    rule = BatchRule(0.010, 8)
    for _ in range(3):
        rule.observe(0.020)
    assert rule.allowed() == 2
    rule.observe(0.020)
    assert rule.allowed() == 1
    for _ in range(10):
        rule.observe(0.010)
    assert rule.allowed() == 1, "the mean of the last ten is within the band only at the end"
    for _ in range(30):
        rule.observe(0.001)
    assert rule.allowed() == 8


def test_the_batch_rule_limits_the_running_sequences() -> None:
    crowd = tuple(TraceRequest(0.02 * n, 10, 50) for n in range(40))
    free = simulate(crowd, FREE, COST)
    limited = simulate(crowd, FREE, COST, control=BatchRule(0.015, FREE.schedule.max_running))
    assert limited.classes["all"].itl.p50 < free.classes["all"].itl.p50
    assert limited.classes["all"].finished == 40


REQUEST = st.builds(
    TraceRequest,
    at=st.floats(0, 3),
    text=st.integers(1, 40),
    output=st.integers(1, 12),
    images=st.lists(st.sampled_from([("cat", 5), ("dog", 30), ("elk", 90), ("fox", 90)]), max_size=3).map(
        tuple
    ),
    system=st.sampled_from([0, 20]),
    priority=st.integers(0, 2),
    timeout=st.sampled_from([None, None, None, 0.05]),
)
CONFIG = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(POLICY_NAMES),
        "max_passes": st.integers(0, 4),
        "max_running": st.integers(1, 6),
        "max_step_tokens": st.sampled_from([8, 64, 2048]),
        "max_step_visual_tokens": st.sampled_from([16, 4096]),
        "pace": st.sampled_from([0, 1, 3.0]),
        "target_itl_ms": st.sampled_from([0, 15]),
        "kv_blocks": st.integers(25, 60),
        "embed_cache_mib": st.sampled_from([0, 1]),
        "prefix_cache": st.booleans(),
    }
)


@settings(deadline=None, max_examples=150 if is_thorough() else 30)
@given(requests=st.lists(REQUEST, min_size=1, max_size=25), config=CONFIG)
def test_under_any_policy_every_request_is_served_and_none_is_passed_too_often(
    requests: list[TraceRequest], config: dict[str, Any]
) -> None:
    """Every request ends, and at most `max_passes` later ones join before it.

    It gets its whole answer unless it has a timeout or can never fit. The oldest request always advances by a
    token or a slice, so the clock is bounded, too: by the sum of the times that the requests would take
    alone, once more for every preemption.
    """
    trace: Trace = tuple(sorted(requests, key=lambda request: request.at))
    settings_ = EngineConfig.of(max_queue=0, **config)
    report = simulate(trace, settings_, COST)
    room = settings_.kv.kv_blocks * settings_.kv.block_size
    never = sum(r.prompt_tokens + r.output > room for r in trace)
    done = report.classes["all"].finished
    assert report.refused == never
    assert done + report.timeouts + never == len(trace)
    assert report.timeouts <= sum(r.timeout is not None for r in trace)
    assert report.most_passed <= settings_.schedule.max_passes
    assert report.seconds <= trace[-1].at + (1 + report.preemptions) * sum(map(_alone, trace))


def _alone(request: TraceRequest) -> float:
    """Return an upper bound of a request's seconds alone: a step per token and per slice, and a wait."""
    encoding = sum(COST.image(tokens) + COST.slices(tokens) * COST.step_s for _, tokens in request.images)
    steps = request.prompt_tokens + request.output
    return 0.1 + encoding * len(request.images) + steps * COST.step(Composition(1, 0, 1, 1))
