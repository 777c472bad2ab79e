"""SageMaker's contract against the rendered entry point, with a model in its folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fovea.deploy.targets import sagemaker
from fovea.deploy.write import write
from fovea.engine.load import resolve
from tests.deploy.contracts.replay import (
    ANSWER,
    CIRCLES,
    PAIR,
    SPEC,
    Record,
    forked,
    replay,
    started,
)
from tests.support import servers


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sagemaker")
    write(sagemaker.render(SPEC), folder)
    return folder / "sagemaker"


@pytest.fixture(scope="module", params=[forked, pytest.param(started, marks=pytest.mark.slow)])
def record(request: pytest.FixtureRequest, container: Path) -> Record:
    port = servers.free_port()
    variables = {"SAGEMAKER_BIND_TO_PORT": str(port), "SM_MODEL_DIR": str(resolve("fovea-tiny", ""))}
    calls = {
        "one": CIRCLES,
        "two": PAIR,
        "stream": {**CIRCLES, "stream": True},
        "instances": {"instances": [CIRCLES]},
        "empty": {},
        "no JSON": b"{",
        "oversize": b" " * (SPEC.max_body_mib * 1024 * 1024 + 1),
    }
    with request.param([str(container / "entrypoint.sh"), "serve"], variables, container / "log") as process:
        return replay(process, port, "/ping", "/invocations", calls)


def test_ping_is_unhealthy_until_the_model_is_loaded(record: Record) -> None:
    assert set(record.health[:-1]) == {503}
    assert record.health[-1] == 200


def test_invocations_about_one_and_two_images(record: Record) -> None:
    assert record.replies["one"].json()["choices"][0]["message"]["content"] == ANSWER
    assert len(record.replies["two"].json()["fovea"]["images"]) == 2
    (prediction,) = record.replies["instances"].json()["predictions"]
    assert prediction["choices"][0]["message"]["content"] == ANSWER


def test_an_invocation_may_be_streamed(record: Record) -> None:
    assert record.replies["stream"].headers["content-type"].startswith("text/event-stream")
    assert record.replies["stream"].text.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(("name", "status"), [("empty", 400), ("no JSON", 400), ("oversize", 413)])
def test_wrong_bodies_are_refused(record: Record, name: str, status: int) -> None:
    assert record.replies[name].status_code == status
    assert record.replies[name].json()["error"]["message"]


def test_sigterm_lets_a_stream_end(record: Record) -> None:
    assert record.refused[-1] == 503
    assert record.drained[-1] == "data: [DONE]"
    assert "error" not in record.drained[-2]
    assert record.exit_status == 0


@pytest.mark.parametrize(
    ("argument", "files", "words"),
    [("train", (), "accepted: serve"), ("serve", ("model/config.json",), "has no config.json")],
)
def test_a_wrong_deployment_does_not_start(
    container: Path, tmp_path: Path, argument: str, files: tuple[str, ...], words: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    ended = subprocess.run(
        [str(container / "entrypoint.sh"), argument],
        env={"PATH": "/usr/bin:/bin", "SM_MODEL_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert words in ended.stderr
