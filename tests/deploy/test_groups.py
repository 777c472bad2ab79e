"""Engines on several devices: one pod with as many GPUs, or a group of pods with one GPU each."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from fovea.core.errors import ConfigError
from fovea.deploy.lint import lint
from fovea.deploy.spec import DeploySpec, Gateway, Pool
from fovea.deploy.target import render

POOL = Pool(
    name="big", hardware="cuda", gpu="H100-80GB", settings={"tensor_parallel": 2, "pipeline_parallel": 2}
)
SPEC = DeploySpec(pools=(POOL,), gateway=Gateway())
GPU = "nvidia.com/gpu"


def objects(target: str) -> list[dict[str, Any]]:
    text = render(SPEC, [target])[f"{target}/base/pool-big.yaml"]
    return [each for each in yaml.safe_load_all(text) if each]


def limits(pod: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = pod["containers"][0]["resources"]["limits"]
    return found


def test_one_pod_has_all_devices_of_its_engine() -> None:
    deployment = next(each for each in objects("kubernetes") if each["kind"] == "Deployment")
    assert limits(deployment["spec"]["template"]["spec"])[GPU] == 4


def test_a_group_has_a_pod_for_each_device_and_only_its_leader_is_found_by_the_service() -> None:
    found = objects("leaderworkerset")
    group = next(each for each in found if each["kind"] == "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    leader, worker = group["leaderTemplate"], group["workerTemplate"]
    assert group["size"] == 4
    assert limits(leader["spec"])[GPU] == limits(worker["spec"])[GPU] == 1
    assert leader["spec"]["containers"][0]["command"] == worker["spec"]["containers"][0]["command"]
    assert "readinessProbe" in leader["spec"]["containers"][0]
    assert not {"ports", "readinessProbe", "livenessProbe", "startupProbe", "lifecycle"} & set(
        worker["spec"]["containers"][0]
    )
    selector = next(each for each in found if each["kind"] == "Service")["spec"]["selector"]
    assert selector.items() <= leader["metadata"]["labels"].items()
    assert not selector.items() <= worker["metadata"]["labels"].items()


def test_ranks_may_talk_to_each_other_and_to_nobody_else() -> None:
    text = render(SPEC, ["leaderworkerset"])["leaderworkerset/base/network.yaml"]
    policies = {each["metadata"]["name"]: each["spec"] for each in yaml.safe_load_all(text) if each}
    (ranks,) = (spec for name, spec in policies.items() if name.endswith("-ranks"))
    components = {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for rule in ranks["ingress"]
        for peer in rule["from"]
    }
    assert components == {"engine", "worker"}
    assert "-ranks" not in render(SPEC, ["kubernetes"])["kubernetes/base/network.yaml"]


@pytest.mark.parametrize("target", ["kubernetes", "leaderworkerset"])
def test_the_linter_finds_no_fault(target: str) -> None:
    assert lint(render(SPEC, [target]), f"{target}/overlays/fixed") == []


def test_a_slice_of_a_gpu_is_one_device() -> None:
    with pytest.raises(ConfigError, match="divide its model among 4 devices"):
        Pool(name="big", hardware="cuda", gpu="H100-80GB", mig="3g.40gb", settings=POOL.settings)
