"""The coarse replica against the engine's own scheduler. docs/cluster.md prints the differences."""

from __future__ import annotations

import pytest

from fovea.cluster.fleet.load import Load
from fovea.cluster.fleet.replica import ReplicaSpec
from fovea.cluster.fleet.simulate import PaperFleet, simulate_paper_fleet
from fovea.engine.config import EngineConfig
from fovea.engine.simulate.fleet import Fleet, simulate_fleet
from fovea.engine.simulate.run import Bounds
from fovea.planner.cost import CostModel

GPU = CostModel(
    step_s=0.0015, decode_s=2e-5, context_s=9.5e-8, token_s=7.2e-5, chunk_s=2e-4, pair_s=2.2e-9,
    image_s=1e-3, visual_s=3.6e-5, visual_pair_s=2.3e-9, slice_s=0.002, between_s=4e-4, read_s=0.0234,
    row_s=7.8e-5, overlap=4.0, kv_token_bytes=57344, visual_token_bytes=7168, max_context=128_000,
)  # fmt: skip
"""About a model of 7 B parameters on an L40S."""
SMALL = Load(
    requests=400, rate=9, images=100, zipf=1.1, think_s=2, output_tokens=64, prompt_tokens=40,
    system_tokens=0, visual_tokens=(64, 256, 1024),
)  # fmt: skip
LARGE = Load(requests=400, rate=6, images=600, visual_tokens=(576, 1024, 1600), output_tokens=100)


@pytest.mark.parametrize(
    ("cost", "load", "replicas"),
    [(CostModel(), SMALL, 1), (GPU, LARGE, 1), (GPU, LARGE, 3)],
    ids=["small", "large", "three"],
)
def test_medians_throughput_and_hits_agree_with_the_scheduler(
    cost: CostModel, load: Load, replicas: int
) -> None:
    config = EngineConfig.of(kv_cache_mib=8192 if cost is GPU else 1024, embed_cache_mib=512)
    trace, following = load.as_trace()
    bounds = Bounds(1.0, 0.05)
    real = simulate_fleet(trace, config, cost, Fleet(replicas), bounds=bounds, following=following)
    fleet = PaperFleet(ReplicaSpec.of(config, cost), Fleet(replicas), bounds=bounds)
    coarse = simulate_paper_fleet(fleet, load)
    # Several engines deal requests to each other by another rule than the gateway, so caches differ more.
    alone = replicas == 1
    report = real.report.classes["all"]
    assert coarse.ttft_p50_s == pytest.approx(report.ttft.p50 / 1e3, rel=0.10 if alone else 0.15)
    assert coarse.itl_p50_s == pytest.approx(report.itl.p50 / 1e3, rel=0.10)
    assert coarse.prefix_hits == pytest.approx(real.report.prefix_hits, abs=0.01 if alone else 0.06)
    assert coarse.images_encoded == pytest.approx(real.report.images_encoded, rel=0.01 if alone else 0.15)
    good = sum(record.good(bounds.ttft_s, bounds.itl_s) for record in real.records)
    assert coarse.outcomes["good"] == pytest.approx(good, rel=0.05)
    tokens = sum(request.output for request in trace)
    assert coarse.outcomes["good"] + coarse.outcomes["late"] == coarse.requests == len(trace)
    assert tokens == sum(len(record.tokens) for record in real.records)
