"""Rendered files of Triton, Vertex AI, SageMaker and Spaces, and that their checks find mistakes."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fovea.core.errors import ConfigError
from fovea.deploy import target as check
from fovea.deploy.spec import Cloud, DeploySpec, Pool
from fovea.deploy.target import target
from fovea.deploy.targets import huggingface_space, sagemaker, triton, vertex
from fovea.deploy.write import write
from tests.deploy.specs import FULL, SMALL
from tests.support.programs import MISSING

NAMES = ("triton", "vertex", "sagemaker", "huggingface-space")
GPU = Pool(
    name="gpu", hardware="cuda", gpu="L4", replicas=2, max_replicas=5, model="Qwen/Qwen3-VL-4B-Instruct"
)


def changed(spec: DeploySpec, **values: Any) -> DeploySpec:
    return replace(spec, pools=(replace(spec.pools[0], **values),))


def settings_of(pbtxt: str) -> dict[str, Any]:
    value = pbtxt.partition("string_value: ")[2].splitlines()[0].removesuffix(" }")
    settings: dict[str, Any] = json.loads(json.loads(value))
    return settings


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", [SMALL, DeploySpec(pools=(GPU,))], ids=["cpu", "gpu"])
def test_the_rendered_files_pass_their_checks(name: str, spec: DeploySpec, tmp_path: Path) -> None:
    renderer = target(name).load()
    write(renderer.render(spec), tmp_path)
    quick = [each for each in renderer.checks(spec) if each.tool != "cfn-lint"]
    outcomes = [check.run_check(each, tmp_path) for each in quick]
    wrong = [outcome for outcome in outcomes if outcome.status == "failed"]
    assert not wrong
    assert any(outcome.status == "passed" for outcome in outcomes)


@pytest.mark.parametrize(
    ("name", "path", "before", "after", "tool"),
    [
        ("triton", "triton/start.sh", '"$@"', "$@", "shellcheck"),
        (
            "triton",
            "triton/Dockerfile",
            "FROM nvcr.io/nvidia/tritonserver:26.07-py3",
            "FROM triton",
            "hadolint",
        ),
        (
            "triton",
            "triton/models/fovea_generate/1/model.py",
            "class TritonPythonModel:",
            "class:",
            "python3",
        ),
        ("vertex", "vertex/entrypoint.sh", '"$model" --config', "$model --config", "shellcheck"),
        ("vertex", "vertex/deploy.sh", "set -eu", "set -eu\nif true", "shellcheck"),
        ("vertex", "vertex/Dockerfile", "ENTRYPOINT [", "ENTRYPOINT ", "hadolint"),
        ("sagemaker", "sagemaker/deploy.sh", '"$here/endpoint.json"', "$here/endpoint.json", "shellcheck"),
        ("sagemaker", "sagemaker/endpoint.json", '"Resources": {', '"Resources": ', "python3"),
        ("huggingface-space", "space/Dockerfile", "python:3.12-slim", "python", "hadolint"),
        ("huggingface-space", "space/app.py", "def predict(", "def predict", "python3"),
    ],
)
def test_a_mutated_file_fails_its_check(
    name: str, path: str, before: str, after: str, tool: str, tmp_path: Path
) -> None:
    renderer = target(name).load()
    files = renderer.render(SMALL)
    assert before in files[path]
    write({**files, path: files[path].replace(before, after)}, tmp_path)
    wanted = [each for each in renderer.checks(SMALL) if each.tool == tool]
    outcomes = [check.run_check(each, tmp_path) for each in wanted]
    if all(outcome.status == "skipped" for outcome in outcomes):
        pytest.skip(f"{MISSING}{tool}")
    assert "failed" in {outcome.status for outcome in outcomes}


@pytest.mark.slow
def test_cloudformation_s_own_checker_accepts_the_template_and_finds_a_wrong_property(tmp_path: Path) -> None:
    spec = DeploySpec(pools=(GPU,))
    files = sagemaker.render(spec)
    path = "sagemaker/endpoint.json"
    (linting,) = (each for each in sagemaker.checks(spec) if each.tool == "cfn-lint")
    write(files, tmp_path / "right")
    right = check.run_check(linting, tmp_path / "right")
    if right.status == "skipped":
        pytest.skip(f"{MISSING}cfn-lint")
    assert right.status == "passed", right.output
    write({**files, path: files[path].replace("InstanceType", "InstanceKind")}, tmp_path / "wrong")
    wrong = check.run_check(linting, tmp_path / "wrong")
    assert wrong.status == "failed"
    assert "InstanceKind" in wrong.output


def test_triton_gets_settings_of_the_engine_and_of_media_and_none_of_a_server() -> None:
    spec = changed(SMALL, settings={"kv_cache_mib": 64, "max_images": 3, "max_places_per_key": 5})
    settings = settings_of(triton.render(spec)["triton/models/fovea_generate/config.pbtxt"])
    assert settings == {
        "model": "fovea-tiny",
        "engine": {"device": "cpu", "kv_cache_mib": 64},
        "media": {"max_images": 3},
        "timeout_s": 600.0,
    }


def test_every_input_that_the_model_reads_is_declared_and_optional() -> None:
    config = triton.render(SMALL)["triton/models/fovea_generate/config.pbtxt"]
    source = triton.render(SMALL)["triton/models/fovea_generate/1/model.py"]
    assert "decoupled: true" in config
    assert "max_batch_size: 0" in config
    inputs = config.partition("input [")[2].partition("\n]\n")[0].split("},")
    assert len(inputs) == 12
    for tensor in inputs:
        (name,) = re.findall(r'name: ("\w+")', tensor)
        assert name in source
        assert "optional: true" in tensor


def test_a_gpu_pool_gets_one_instance_on_the_gpu() -> None:
    config = triton.render(FULL)["triton/models/fovea_generate/config.pbtxt"]
    assert "kind: KIND_GPU count: 1 gpus: [ 0 ]" in config
    assert settings_of(config)["engine"]["device"] == "cuda"


def test_vertex_machines_follow_the_pool() -> None:
    script = vertex.render(DeploySpec(pools=(GPU,)))["vertex/deploy.sh"]
    for flag in (
        "--machine-type=g2-standard-8", "--accelerator=type=nvidia-l4,count=1", "--min-replica-count=2",
        "--max-replica-count=5", "--autoscaling-metric-specs=gpu-duty-cycle=70",
        "--container-health-route=/ready",
    ):  # fmt: skip
        assert flag in script
    assert "--gpu-partition-size=3g.20gb" in vertex.render(FULL)["vertex/deploy.sh"]
    spot = vertex.render(DeploySpec(pools=(replace(GPU, spot=True),)))["vertex/deploy.sh"]
    assert "--spot" in spot


def test_sagemaker_s_limits_are_the_server_s() -> None:
    files = sagemaker.render(SMALL)
    settings = tomllib.loads(files["sagemaker/fovea.toml"])
    assert (settings["max_body_mib"], settings["request_timeout"]) == (25, 480.0)
    assert settings["drain_seconds"] < 30, "SageMaker kills the container 30 seconds after SIGTERM"
    assert not {"model", "host", "port"} & set(settings)


def test_sagemaker_scales_only_if_the_pool_may_grow() -> None:
    def resources(spec: DeploySpec) -> set[str]:
        return set(json.loads(sagemaker.render(spec)["sagemaker/endpoint.json"])["Resources"])

    assert resources(SMALL) == {"Model", "Configuration", "Endpoint"}
    assert resources(DeploySpec(pools=(GPU,))) - resources(SMALL) == {"Scaling", "ScalingPolicy"}


def test_a_region_of_another_cloud_is_left_to_the_aws_client() -> None:
    assert "--region" not in sagemaker.render(SMALL)["sagemaker/deploy.sh"]
    script = sagemaker.render(replace(SMALL, cloud=Cloud(region="eu-west-1")))["sagemaker/deploy.sh"]
    assert "--region eu-west-1" in script


@pytest.mark.parametrize(
    ("renderer", "values", "words"),
    [
        (vertex, {"hardware": "cuda", "gpu": "A30"}, "gpu is 'A30'; accepted for Vertex AI: T4"),
        (vertex, {"cpus": 64}, "cpus is 64"),
        (sagemaker, {"hardware": "cuda"}, "gpu is ''; accepted for SageMaker: T4"),
        (sagemaker, {"hardware": "cuda", "gpu": "A100-40GB", "mig": "3g.20gb"}, "have whole GPUs"),
        (sagemaker, {"cpus": 64}, "cpus is 64"),
    ],
)
def test_a_pool_without_a_machine_is_refused(renderer: Any, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        renderer.render(changed(SMALL, **values))
    assert words in error.value.message


@pytest.mark.parametrize(
    ("pool", "hardware"),
    [
        (Pool(name="a", cpus=2), "cpu-basic"),
        (Pool(name="a", cpus=4), "cpu-upgrade"),
        (GPU, "l4x1"),
        (replace(GPU, gpu="H100-80GB"), None),
    ],
)
def test_a_space_suggests_hardware_that_spaces_have(pool: Pool, hardware: str | None) -> None:
    readme = huggingface_space.render(DeploySpec(pools=(pool,)))["space/README.md"]
    matter = yaml.safe_load(readme.split("---\n")[1])
    assert {matter["colorFrom"], matter["colorTo"]} <= {"red", "green", "blue", "indigo", "purple", "pink"}
    assert (matter["sdk"], matter["app_port"]) == ("docker", 7860)
    assert len(matter["short_description"]) <= 60
    assert (f"suggested_hardware: {hardware}\n" in readme) == (hardware is not None)
    assert ("suggested_hardware" in readme) == (hardware is not None)
