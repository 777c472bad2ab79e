"""The deployment scripts, with stand-ins for the programs of the clouds that record how they are called."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from fovea.deploy.spec import Cloud, DeploySpec, Pool
from fovea.deploy.targets import sagemaker, vertex
from fovea.deploy.write import write

SPEC = DeploySpec(
    pools=(Pool(name="gpu", hardware="cuda", gpu="L4", replicas=2, max_replicas=5),),
    name="vlm",
    cloud=Cloud(project="acme", region="eu-west-1"),
)
STAND_IN = """#!/bin/sh
{ printf '%s' "${0##*/}"; printf ' %s' "$@"; echo; } >> "$CALLS"
case "$*" in
  *"models upload"*) echo projects/1/locations/r/models/77 ;;
  *print-access-token*) echo secret ;;
  *"endpoints describe"*) echo 5 ;;
  *"--request POST"*) printf '{\\n  "name": "projects/1/locations/r/endpoints/42/operations/9",\\n}' ;;
esac
"""


def run(script: Path, *arguments: str, **variables: str) -> tuple[int, list[str], str]:
    """Return the exit status, the calls and the errors of a script."""
    folder = script.parent
    programs, calls = folder / "bin", folder / "calls"
    programs.mkdir(exist_ok=True)
    calls.unlink(missing_ok=True)
    for name in ("gcloud", "curl", "aws"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "CALLS": str(calls), **variables}
    ended = subprocess.run(
        [str(script), *arguments], env=variables, capture_output=True, text=True, check=False
    )
    return ended.returncode, calls.read_text().splitlines() if calls.exists() else [], ended.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write({**vertex.render(SPEC), **sagemaker.render(SPEC)}, tmp_path)
    return tmp_path


def call(calls: list[str], words: str) -> str:
    (found,) = (line for line in "\n".join(calls).replace(",\n", ", ").splitlines() if words in line)
    return found


def test_the_first_model_gets_a_dedicated_endpoint_and_all_traffic(folder: Path) -> None:
    status, calls, errors = run(folder / "vertex" / "deploy.sh", "image:1", ARTIFACTS="gs://models/7")
    assert status == 0, errors
    upload = call(calls, "models upload")
    for flag in (
        "--container-image-uri=image:1", "--container-predict-route=/v1/predict", "--region=eu-west-1",
        "--container-health-route=/ready", "--artifact-uri=gs://models/7",
    ):  # fmt: skip
        assert flag in upload
    created = call(calls, "--request POST")
    assert (
        "https://eu-west-1-aiplatform.googleapis.com/v1/projects/acme/locations/eu-west-1/endpoints"
        in created
    )
    assert "secret" not in "\n".join(calls)
    body = json.loads(created.partition("--data ")[2])
    assert body["dedicatedEndpointEnabled"] is True
    assert body["clientConnectionConfig"] == {"inferenceTimeout": "600s"}
    deployed = call(calls, "endpoints deploy-model")
    for flag in ("deploy-model 42", "--model=77", "--traffic-split=0=100", "--min-replica-count=2"):
        assert flag in deployed


def test_a_second_model_gets_its_share_of_the_traffic(folder: Path) -> None:
    status, calls, errors = run(folder / "vertex" / "deploy.sh", "image:2", "42", "10")
    assert status == 0, errors
    assert "--traffic-split=0=10,5=90" in call(calls, "endpoints deploy-model")
    assert not any("--request POST" in line for line in calls)


def test_sagemaker_s_stack_gets_image_model_and_role(folder: Path) -> None:
    script = folder / "sagemaker" / "deploy.sh"
    role = "arn:aws:iam::123456789012:role/endpoints"
    status, calls, errors = run(script, "image:1", "s3://models/7.tar.gz", ROLE=role)
    assert status == 0, errors
    deployed = call(calls, "cloudformation deploy")
    assert "--stack-name vlm --region eu-west-1" in deployed
    assert f"Image=image:1 ModelData=s3://models/7.tar.gz Role={role}" in deployed


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("vertex/deploy.sh", (), "usage: deploy.sh IMAGE"),
        ("sagemaker/deploy.sh", (), "usage: deploy.sh IMAGE"),
        ("sagemaker/deploy.sh", ("image:1",), "set ROLE to the ARN"),
    ],
)
def test_a_missing_argument_is_named_before_anything_is_called(
    folder: Path, script: str, arguments: tuple[str, ...], words: str
) -> None:
    status, calls, errors = run(folder / script, *arguments)
    assert status != 0
    assert words in errors
    assert calls == []
