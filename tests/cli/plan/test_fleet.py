"""A plan of several replicas is played on the simulated fleet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fovea.cli.plan.fleet import MOST, PlannedFleet, PlannedLoad, plan_fleet
from fovea.cli.plan.inputs import find_model
from fovea.cli.plan.result import prompt_cost
from fovea.planner.hardware import find, known_hardware
from fovea.planner.option import Option, evaluate
from fovea.planner.precision import RECIPES
from fovea.planner.roofline import Setup
from fovea.planner.workload import Kind, Workload

MODEL = find_model("Qwen/Qwen2.5-VL-7B-Instruct")
DEVICE = find("L40S", known_hardware())


def planned(**fields: Any) -> tuple[Option, Workload]:
    kind = Kind("question", images=((896, 896),), text=40, answer=40, follow_ups=1.0, seen=0.6)
    workload = Workload((kind,), **{"rate": 6.0, "ttft_ms": 2000.0, "itl_ms": 100.0} | fields)
    return evaluate(Setup(MODEL.shape, DEVICE, RECIPES["none"]), workload, MODEL.count), workload


def play(option: Option, workload: Workload) -> PlannedFleet:
    found = plan_fleet(option, workload, prompt_cost(option))
    assert found is not None
    return found


def test_one_replica_needs_no_fleet() -> None:
    option, workload = planned(rate=0.1)
    assert option.replicas == 1
    assert plan_fleet(option, workload, prompt_cost(option)) is None


def test_affinity_is_compared_with_round_robin_and_replicas_are_counted() -> None:
    option, workload = planned()
    option = replace(option, replicas=3)
    found = play(option, workload)
    assert (found.replicas, found.simulated) == (3, 3)
    assert found.affine.encoder_hits > found.plain.encoder_hits + 0.1
    assert all(2 <= needed <= 6 for needed in found.needed)
    first, second = found.sentences(workload)
    assert first.startswith("routing of 3 replicas (720 simulated requests): cache-affine finds ")
    assert "replicas for 95% (" in second
    assert "formulas: 3)" in second


def test_without_targets_no_number_is_needed() -> None:
    option, workload = planned(ttft_ms=0.0, itl_ms=0.0)
    found = play(replace(option, replicas=2), workload)
    assert found.needed == ()
    assert found.affine.within == 1.0
    assert len(found.sentences(workload)) == 1


def test_a_few_replicas_stand_for_many() -> None:
    option, workload = planned(ttft_ms=0.0, itl_ms=0.0, rate=40.0)
    found = play(replace(option, replicas=2 * MOST), workload)
    assert found.simulated == MOST
    assert f", {MOST} stand for them)" in found.sentences(workload)[0]


@pytest.mark.parametrize("seed", [0, 1])
def test_conversations_have_the_workloads_follow_ups_and_repeats(seed: int) -> None:
    option, workload = planned()
    load = PlannedLoad(option.kinds, 7, workload.rate, 4000, 2, seed)
    found = list(load.conversations())
    assert found == list(load.conversations())
    assert 0.95 < sum(len(one.turns) for one in found) / (2 * len(found)) < 1.05
    assert 0.35 < len({one.image for one in found}) / len(found) < 0.45
    assert 0.9 < len(found) / found[-1].at / workload.rate < 1.1
