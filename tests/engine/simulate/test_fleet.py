"""Fleets on the virtual clock: one engine is the plain simulation, and encoders apart take encoding away."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fovea.core.errors import ConfigError
from fovea.core.trace import TraceRequest, Workload, generate
from fovea.engine.config import EngineConfig
from fovea.engine.schedule.itl_limit import BatchRule
from fovea.engine.simulate.executor import NoiseSettings
from fovea.engine.simulate.fleet import Fleet, simulate_fleet
from fovea.engine.simulate.run import simulate
from fovea.planner.cost import CostModel

COST = CostModel()
CONFIG = EngineConfig.of(max_queue=0)
INSTANT = replace(COST, image_s=0.0, visual_s=0.0, visual_pair_s=0.0)
FREE_TRANSFER = {"transfer_ms": 0.0, "transfer_mb_s": 1e9}
LOADS = st.builds(
    Workload,
    requests=st.integers(5, 60),
    rate=st.floats(1, 40),
    text=st.sampled_from([0.0, 0.5, 0.9]),
    images=st.sampled_from([3, 300]),
    images_per_request=st.integers(1, 3),
    arrivals=st.sampled_from(["poisson", "burst"]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=15, deadline=None)
@given(LOADS)
def test_one_integrated_engine_is_the_plain_simulation(load: Workload) -> None:
    trace = generate(load)
    alone = simulate(trace, CONFIG, COST)
    assert simulate_fleet(trace, CONFIG, COST, Fleet()).report.as_dict() == alone.as_dict()


@settings(max_examples=15, deadline=None)
@given(LOADS, st.integers(1, 3), st.integers(1, 3))
def test_text_does_not_notice_encoders(load: Workload, encoders: int, replicas: int) -> None:
    trace = generate(replace(load, text=1.0))
    apart = simulate_fleet(trace, CONFIG, COST, Fleet(replicas, encoders))
    assert apart.records == simulate_fleet(trace, CONFIG, COST, Fleet(replicas)).records
    assert (apart.transfers, apart.encoders_busy) == (0, 0.0)


@settings(max_examples=20, deadline=None)
@given(LOADS)
def test_instant_encoders_with_free_transfer_are_no_worse(load: Workload) -> None:
    trace = generate(load)
    here = simulate_fleet(trace, CONFIG, COST, Fleet()).report
    apart = simulate_fleet(trace, CONFIG, COST, Fleet(1, 1, **FREE_TRANSFER), encoder_cost=INSTANT).report
    ours, theirs = apart.classes["all"], here.classes["all"]
    step_ms = 1e3 * (COST.step_s + COST.between_s + COST.chunk_s) + 5
    assert apart.requests_per_s >= here.requests_per_s * 0.98
    assert apart.goodput >= here.goodput * 0.98
    assert ours.ttft.p50 <= theirs.ttft.p50 + step_ms
    assert ours.ttft.p99 <= theirs.ttft.p99 + step_ms
    assert ours.finished == theirs.finished == len(trace)


@settings(max_examples=15, deadline=None)
@given(LOADS, st.integers(0, 3), st.integers(1, 3))
def test_every_request_ends_once_and_every_image_is_encoded(
    load: Workload, encoders: int, replicas: int
) -> None:
    trace = generate(load)
    found = simulate_fleet(trace, CONFIG, COST, Fleet(replicas, encoders))
    assert [record.reason for record in found.records] == ["length"] * len(trace)
    assert [len(record.tokens) for record in found.records] == [request.output for request in trace]
    assert [record.arrival for record in found.records] == [request.at for request in trace]
    images = {key for request in trace for key, _ in request.images}
    assert found.report.images_encoded >= len(images)
    if encoders == 1:
        assert found.report.images_encoded == len(images)


def test_an_image_waits_for_its_encoder_and_its_transfer() -> None:
    trace = tuple(TraceRequest(0.0, 10, 3, ((key, 200),)) for key in ("cat", "dog"))
    fleet = Fleet(1, 1, transfer_ms=50.0, transfer_mb_s=1.0)
    found = simulate_fleet(trace, CONFIG, COST, fleet)
    transfer = 0.05 + 200 * COST.visual_token_bytes / 1e6
    for number, record in enumerate(found.records, 1):
        assert record.admitted is not None
        assert record.admitted >= number * COST.image(200) + transfer
        assert record.tokens[0] < number * COST.image(200) + transfer + 0.03
    assert found.transfers == 2
    assert found.transfer_bytes == 400 * COST.visual_token_bytes
    assert found.transfer_s == pytest.approx(2 * transfer)
    busy = found.encoders_busy * found.report.seconds
    assert busy == pytest.approx(2 * COST.image(200)) == found.report.encode_seconds


def test_an_output_that_an_engine_has_is_not_sent_again() -> None:
    trace = tuple(TraceRequest(at, 10, 3, (("cat", 200),)) for at in (0.0, 5.0))
    assert simulate_fleet(trace, CONFIG, COST, Fleet(1, 1)).transfers == 1
    lost = CONFIG.changed(prefix_cache=False, embed_cache_mib=0)
    assert simulate_fleet(trace, lost, COST, Fleet(1, 1)).transfers == 2


def test_two_encoders_share_images() -> None:
    trace = tuple(TraceRequest(0.0, 10, 1, ((f"image {n}", 500),)) for n in range(40))
    one, two = (simulate_fleet(trace, CONFIG, COST, Fleet(1, encoders)).report for encoders in (1, 2))
    assert two.classes["all"].ttft.longest < 0.7 * one.classes["all"].ttft.longest


def test_noise_and_control_are_those_of_each_engine() -> None:
    trace = generate(Workload(requests=40, rate=20))
    noise = NoiseSettings(noise=0.5)
    controls: list[BatchRule] = []

    def control() -> BatchRule:
        controls.append(BatchRule(0.01, 8))
        return controls[-1]

    disturbed = simulate_fleet(trace, CONFIG, COST, Fleet(2, 1), noise=noise, control=control)
    assert len(controls) == 2
    assert disturbed.records != simulate_fleet(trace, CONFIG, COST, Fleet(2, 1)).records


def test_a_fleet_has_bounds() -> None:
    with pytest.raises(ConfigError, match="replicas is 0"):
        Fleet(0)
    with pytest.raises(ConfigError, match="encoders is -1"):
        Fleet(1, -1)
    assert Fleet(2, 3).integrated == Fleet(5)
    assert (Fleet(2, 3).title, Fleet(5).title) == ("3 encode + 2 answer", "5 integrated")
