"""The target rayservice: what it gives Ray Serve is what `fovea cluster` gives it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fovea.cluster.ray.build import Plan
from fovea.cluster.scaling import ScaleSettings
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import render
from tests.deploy.specs import FULL, SMALL

SPECS = {"small": SMALL, "full": FULL}
VALIDATE = """
import json, sys
from ray.serve.schema import ServeDeploySchema
for config in json.load(sys.stdin):
    print([application.name for application in ServeDeploySchema.model_validate(config).applications])
"""


def services(spec: DeploySpec) -> list[dict[str, Any]]:
    files = render(spec, ["rayservice"])
    objects = [
        each
        for pool in spec.pools
        for each in yaml.safe_load_all(files[f"rayservice/base/pool-{pool.name}.yaml"])
    ]
    return [each["spec"] for each in objects if each["kind"] == "RayService"]


def configs(spec: DeploySpec) -> list[dict[str, Any]]:
    return [yaml.safe_load(service["serveConfigV2"]) for service in services(spec)]


@pytest.mark.parametrize("name", SPECS)
def test_a_replica_understands_its_plan(name: str) -> None:
    for pool, config in zip(SPECS[name].pools, configs(SPECS[name]), strict=True):
        (application,) = config["applications"]
        (plan,) = (Plan(**values) for values in application["args"]["plans"])
        assert (plan.application, plan.answers, plan.has_peers) == (pool.name, True, False)
        assert plan.settings["model"] == pool.model
        assert not {"host", "port"} & plan.settings.keys()
        (deployment,) = application["deployments"]
        scaling = deployment.get("autoscaling_config")
        assert (scaling is not None) == bool(pool.max_replicas)
        if scaling is not None:
            settings = ScaleSettings(**scaling["policy"]["policy_kwargs"])
            assert (settings.replicas_min, settings.replicas_max) == (pool.replicas, pool.max_replicas)


def test_each_engine_has_a_pod_and_the_head_has_none() -> None:
    qwen, _, tiny = (service["rayClusterConfig"] for service in services(FULL))
    (workers,) = qwen["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (2, 6)
    assert workers["rayStartParams"] == {"num-cpus": "8", "num-gpus": "1"}  # a slice is a GPU for Ray
    assert qwen["enableInTreeAutoscaling"]
    assert not tiny["enableInTreeAutoscaling"]
    head = qwen["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    (container,) = head["template"]["spec"]["containers"]
    assert not [key for key in container["resources"]["limits"] if "nvidia" in key]
    names = {each["name"]: each.get("value") for each in container["env"]}
    assert names["RAY_SERVE_ENABLE_HA_PROXY"] == "1"


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray")
def test_ray_serve_accepts_the_configuration() -> None:
    found = subprocess.run(
        [sys.executable, "-c", VALIDATE],
        input=json.dumps([*configs(SMALL), *configs(FULL)]),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert found.stdout.split("\n")[:2] == ["['tiny']", "['qwen']"], found.stderr
