"""Speed under a steady load: conservation laws, monotony, and the simulator as the reference.

The factors of the comparison were measured first. They say how far the formulas may be off; the simulator
plays the engine's own scheduler with the same cost model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.planner.cost import CostModel
from fovea.planner.roofline import cost_model
from fovea.planner.steady import (
    SLOWEST_RATE,
    Demand,
    Mix,
    closed,
    decode_step,
    demand,
    mean_demand,
    most_rate,
    open_load,
)
from fovea.planner.workload import Tokens
from tests.planner.play import Load, play_closed, play_open
from tests.planner.small import setup_of
from tests.support.thorough import examples

COSTS = Path(__file__).parents[2] / "benchmarks" / "costs"
TINY = CostModel.load(COSTS / "fovea-tiny.json")
QWEN = CostModel.load(COSTS / "qwen2.5-vl-0.5b.json")
TEXT, LONG, IMAGE = Load(200, 100), Load(800, 200), Load(60, 60, (300,))
SMALL, JUMP = 0.02, 0.05
"""Chunks of prompts are whole tokens, so that curves have small steps. Batches
are whole numbers, so that rates jump."""
LOADS = st.builds(
    Load, st.integers(1, 900), st.integers(1, 300), st.sampled_from([(), (64,), (300,), (300, 64)])
)
COST_MODELS = st.sampled_from([TINY, QWEN, cost_model(setup_of())])


def saturation(cost: CostModel, mix: Mix) -> float:
    """The highest rate at which any number of clients is answered."""
    return max(closed(cost, mix, clients).requests_per_s for clients in (16, 64, 256))


def test_demand_is_exact() -> None:
    tokens = Tokens((100, 50), (100, 50), 150, 0.5, 1500.0, 1300.0, 40, 30.0, 1540.0)
    one = demand(TINY, tokens, pixels=1000, request_s=0.25, pixel_s=0.001)
    assert one.prepare == 0.25 + 0.5
    assert one.encode == pytest.approx(0.5 * (TINY.image(100) + TINY.image(50)))
    pairs = 1300 * 200 + 1300 * 1301 / 2
    chunks = 2  # of at most 1024 tokens
    parts = 1300 * TINY.token_s + pairs * TINY.pair_s
    parts += chunks * (TINY.step_s + TINY.chunk_s + TINY.between_s)
    assert one.prefill == pytest.approx(parts)
    assert (one.tokens, one.prompt, one.pairs, one.context) == (30.0, 1300.0, pairs, 1520.0)
    assert one.decodes == 29.0


def test_mean_demand_weighs_contexts_by_tokens() -> None:
    mean = mean_demand([(0.25, Demand(1, 2, 3, 100, 1000)), (0.75, Demand(5, 0, 1, 20, 200))])
    assert (mean.prepare, mean.encode, mean.prefill, mean.tokens) == (4.0, 0.5, 1.5, 40.0)
    assert mean.context == pytest.approx((25 * 1000 + 15 * 200) / 40)


def test_one_client_waits_for_nobody() -> None:
    mix = IMAGE.mix(TINY)
    one = mix[0][1]
    speed = closed(TINY, mix, 1)
    assert speed.ttft_s == one.first
    assert speed.itl_s == decode_step(TINY, 1, one.context)
    assert speed.requests_per_s == pytest.approx(1 / (one.first + 59 * speed.itl_s))
    assert speed.busy == pytest.approx(1)


@settings(max_examples=examples(24), deadline=None)
@given(COST_MODELS, LOADS, st.integers(1, 300), st.floats(0, 2))
def test_clients_are_rate_times_latency(cost: CostModel, load: Load, clients: int, prepare: float) -> None:
    mix = [(share, replace(one, prepare=prepare)) for share, one in load.mix(cost)]
    speed = closed(cost, mix, clients)
    decodes = mean_demand(mix).decodes
    whole = speed.ttft_s + decodes * speed.itl_s
    assert speed.requests_per_s * whole == pytest.approx(clients, rel=1e-6)
    assert 0 <= speed.batch <= clients
    assert speed.tokens_per_s == pytest.approx(speed.requests_per_s * load.answer)


@settings(max_examples=examples(24), deadline=None)
@given(COST_MODELS, LOADS, st.floats(0.01, 0.9), st.floats(50, 99))
def test_little_holds_for_those_that_decode(
    cost: CostModel, load: Load, share: float, percentile: float
) -> None:
    mix = load.mix(cost)
    rate = share * most_rate(cost, mix, 256)
    speed = open_load(cost, mix, rate, 256, percentile)
    assert speed is not None
    # Batches are whole numbers: where one more sequence changes the times, the rate jumps.
    assert speed.requests_per_s == pytest.approx(rate, rel=JUMP)
    assert speed.batch == pytest.approx(speed.requests_per_s * mean_demand(mix).decodes * speed.itl_s)
    assert speed.ttft_p_s >= speed.ttft_s
    assert speed.itl_p_s >= speed.itl_s
    assert 0 < speed.busy <= 1


@settings(max_examples=examples(24), deadline=None)
@given(COST_MODELS, LOADS, st.floats(0.05, 0.45))
def test_a_higher_rate_is_never_faster(cost: CostModel, load: Load, share: float) -> None:
    mix = load.mix(cost)
    most = most_rate(cost, mix, 256)
    slow, fast = (open_load(cost, mix, part * most, 256) for part in (share, 2 * share))
    assert slow is not None
    assert fast is not None
    assert fast.batch >= slow.batch
    assert fast.itl_s >= slow.itl_s * (1 - 1e-3)
    # More decodes allow larger chunks, so that a first token can come a little sooner. The queue is longer.
    assert fast.ttft_s >= slow.ttft_s * 0.7


@settings(max_examples=examples(24), deadline=None)
@given(COST_MODELS, LOADS)
def test_independent_arrivals_never_get_more_than_waiting_clients(cost: CostModel, load: Load) -> None:
    mix = load.mix(cost)
    assert most_rate(cost, mix, 256) <= saturation(cost, mix) * (1 + SMALL)


@settings(max_examples=examples(24), deadline=None)
@given(COST_MODELS, LOADS, st.floats(1.1, 30), st.floats(1.1, 30))
def test_the_highest_rate_meets_the_targets(cost: CostModel, load: Load, first: float, gap: float) -> None:
    mix = load.mix(cost)
    alone = open_load(cost, mix, SLOWEST_RATE, 64)
    assert alone is not None
    targets = {"ttft_s": first * alone.ttft_p_s, "itl_s": gap * alone.itl_p_s}
    rate = most_rate(cost, mix, 64, **targets)
    if not rate:  # the first request that meets another misses a tight target
        return
    met = open_load(cost, mix, rate * (1 - 1e-6), 64)
    assert met is not None
    assert met.ttft_p_s <= targets["ttft_s"] * (1 + SMALL)
    assert met.itl_p_s <= targets["itl_s"] * (1 + SMALL)
    assert rate <= most_rate(cost, mix, 64) * (1 + 1e-9)


def test_a_rate_beyond_the_highest_is_refused() -> None:
    mix = IMAGE.mix(TINY)
    most = most_rate(TINY, mix, 64)
    assert open_load(TINY, mix, most * 0.99, 64) is not None
    assert open_load(TINY, mix, most * 1.2, 64) is None
    assert most_rate(TINY, mix, 0) == 0
    assert most_rate(TINY, mix, 64, ttft_s=mix[0][1].first / 2) == 0
    assert most_rate(TINY, mix, 64, itl_s=TINY.step_s / 2) == 0


@settings(max_examples=examples(24), deadline=None)
@given(COST_MODELS, LOADS, st.integers(1, 300))
def test_longer_prompts_and_answers_are_never_cheaper(cost: CostModel, load: Load, more: int) -> None:
    most = most_rate(cost, load.mix(cost), 256)
    longer_text = replace(load, text=load.text + more).mix(cost)
    assert most_rate(cost, longer_text, 256) <= most * (1 + SMALL)
    longer_answer = replace(load, answer=load.answer + more).mix(cost)
    assert most_rate(cost, longer_answer, 256) <= most * (1 + JUMP)


@pytest.mark.parametrize(
    ("cost", "load", "clients", "factor"),
    [
        pytest.param(QWEN, IMAGE, 8, 1.8, marks=pytest.mark.slow),
        pytest.param(TINY, TEXT, 32, 1.25, marks=pytest.mark.slow),
        (QWEN, IMAGE, 32, 1.25),
    ],
)
def test_throughput_of_clients_agrees_with_the_simulator(
    cost: CostModel, load: Load, clients: int, factor: float
) -> None:
    speed, seen = closed(cost, load.mix(cost), clients), play_closed(cost, load, clients)
    assert 1 / factor <= speed.requests_per_s / seen.requests_per_s <= factor
    assert 1 / factor <= speed.itl_s / seen.itl_s <= factor


def test_small_chunks_of_a_model_with_experts_do_not_stop_it() -> None:
    """With 2 and 4 clients, the formulas once gave less throughput than with one."""
    cost = replace(cost_model(setup_of()), expert_s=0.02, expert_share=0.05, token_s=5e-5)
    mix = LONG.mix(cost)
    rates = [closed(cost, mix, clients).requests_per_s for clients in (1, 2, 4, 8, 32)]
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("cost", "load", "share"),
    [pytest.param(TINY, TEXT, 0.3, marks=pytest.mark.slow), (QWEN, IMAGE, 0.3), (QWEN, IMAGE, 0.7)],
)
def test_latency_of_independent_arrivals_agrees_with_the_simulator(
    cost: CostModel, load: Load, share: float
) -> None:
    mix = load.mix(cost)
    rate = share * saturation(cost, mix)
    speed, seen = open_load(cost, mix, rate, 256), play_open(cost, load, rate)
    assert speed is not None
    assert 1 / 1.6 <= speed.ttft_s / seen.ttft_s <= 1.6
    assert 1 / 2 <= speed.ttft_p_s / seen.ttft_p_s <= 2
    assert 1 / 1.6 <= speed.itl_s / seen.itl_s <= 1.6
