"""`fovea cluster` as a command. Where Ray is installed, one cluster is started, asked and ended."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from fovea.cli.main import main
from fovea.cluster.ray import cluster
from tests.support.servers import free_port

SPEC = """
[ingress]
host = "127.0.0.1"
port = {port}
location = "head"
deregister_s = 1
[[model]]
name = "sim"
simulate = true
drain_s = 5
[[model.role]]
cpus = 0.1
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.toml"
    file.write_text(SPEC.format(port=free_port()))
    return file


@pytest.mark.parametrize("action", ["status", "down"])
def test_what_is_not_up_is_said(action: str, spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", action, "--spec", str(spec)]) == 2
    assert f"no `fovea cluster up` runs for {spec}" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["up", "status", "down"])
def test_without_ray_the_extra_is_named(
    action: str, spec: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec.write_text(f'address = "127.0.0.1:9"\n{spec.read_text()}')
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    assert main(["cluster", action, "--spec", str(spec)]) == 2
    assert "needs it: pip install 'fovea-vlm[cluster]'" in capsys.readouterr().err
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in os.environ


def test_a_wrong_spec_names_file_and_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[[model]]\nsettings = { max_quue = 3 }\n")
    assert main(["cluster", "up", "--spec", str(file)]) == 2
    err = capsys.readouterr().err
    assert "cluster.toml:2: [[model]] number 1 settings: unknown key 'max_quue'" in err
    assert "did you mean 'max_queue'" in err


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give Ray a folder of its own, so that it finds no other Ray of this machine. It needs a short path."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


def run(action: str, spec: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fovea.cli.main", "cluster", action, "--spec", str(spec), *more]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment, **pipes)  # type: ignore[call-overload,no-any-return]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray")
@pytest.mark.usefixtures("ray_folder")
def test_no_ray_at_an_address(spec: Path) -> None:
    spec.write_text(f'address = "127.0.0.1:9"\n{spec.read_text()}')
    process = run("up", spec)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert "no Ray can be reached at 127.0.0.1:9: [Errno" in err


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray")
@pytest.mark.usefixtures("ray_folder")
def test_a_cluster_starts_answers_and_ends(spec: Path) -> None:
    up = run("up", spec)
    try:
        assert up.stdout is not None
        url = ""
        for line in up.stdout:
            if "answers at" in line:
                url = line.split()[-1]
            if line.startswith("up;"):
                break
        assert url, up.communicate()
        wanted = {"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
        request = urllib.request.Request(
            f"{url}/chat/completions", json.dumps(wanted).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.loads(answer.read())["choices"][0]["message"]["content"]
            replica = answer.headers["x-fovea-replica"]
        out, err = run("status", spec, "--json").communicate(timeout=120)
        (role,) = json.loads(out)["models"][0]["roles"]
        assert [one["name"] for one in role["replicas"]] == [replica], err
        again = run("up", spec)
        assert "cannot be listened on" in again.communicate(timeout=120)[1]
        down = run("down", spec)
        assert down.communicate(timeout=120)[0].strip() == "down"
        up.communicate(timeout=120)
        assert up.returncode == 0
    finally:
        if up.poll() is None:
            up.send_signal(signal.SIGKILL)
            up.communicate()
