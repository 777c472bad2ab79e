"""A small load and a small fleet, for tests that take milliseconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from fovea.cluster.fleet.load import Load
from fovea.cluster.fleet.replica import ReplicaSpec
from fovea.cluster.fleet.simulate import PaperFleet
from fovea.engine.config import EngineConfig
from fovea.engine.simulate.fleet import Fleet
from fovea.planner.cost import CostModel

T = TypeVar("T", Load, PaperFleet, ReplicaSpec)
LOAD = Load(
    requests=300, rate=20, images=40, zipf=1.1, think_s=1, output_tokens=40, prompt_tokens=30,
    system_tokens=48, visual_tokens=(64, 256),
)  # fmt: skip
SPEC = ReplicaSpec.of(EngineConfig.of(kv_cache_mib=64, embed_cache_mib=4, max_queue=64), CostModel())


def paper(replicas: int = 4, **options: Any) -> PaperFleet:
    return PaperFleet(SPEC, options.pop("size", Fleet(replicas)), **options)


def change(value: T, **fields: Any) -> T:
    return replace(value, **fields)
