"""The rendered Space, run with a Python that has Gradio, which the variable FOVEA_GRADIO_PYTHON names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

import fovea
from fovea.deploy.targets import huggingface_space
from fovea.deploy.write import write
from tests.deploy.contracts.replay import EXAMPLES, SPEC
from tests.support import servers

PYTHON = os.environ.get("FOVEA_GRADIO_PYTHON", "")
ASK = """
import json, sys
from gradio_client import Client, handle_file
client = Client(sys.argv[1], verbose=False)
answer, heat, figures = client.predict(
    handle_file(sys.argv[2]), "How many circles are there?", 0.5, api_name="/predict"
)
print(json.dumps([answer, bool(heat), figures]))
"""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="FOVEA_GRADIO_PYTHON names no Python")]


def test_the_page_answers_about_a_picture_with_its_relevance(tmp_path: Path) -> None:
    write(huggingface_space.render(SPEC), tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    source = Path(fovea.__file__).parents[1]
    command = f'PYTHONPATH={source} exec {sys.executable} -m fovea.cli.main "$@"'
    for name, line in (("fovea", command), ("python3", f'exec {PYTHON} "$@"')):
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    engine, page = servers.free_port(), servers.free_port()
    variables = {
        "PATH": f"{programs}:/usr/bin:/bin", "HOME": os.environ["HOME"], "FOVEA_PORT": str(engine),
        "PORT": str(page), "GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    script = str(tmp_path / "space" / "start.sh")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            ["env", *(f"{name}={value}" for name, value in variables.items()), "sh", script],
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        until_200(process, f"http://127.0.0.1:{engine}/ready", tmp_path / "log")
        until_200(process, f"http://127.0.0.1:{page}/", tmp_path / "log")
        asked = subprocess.run(
            [PYTHON, "-c", ASK, f"http://127.0.0.1:{page}/", str(EXAMPLES / "shapes.png")],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert asked.returncode == 0, asked.stderr
        answer, heat, figures = json.loads(asked.stdout)
        assert answer == "There is 1 circle."
        assert heat
        assert figures["image"]["visual_tokens"] < figures["image"]["of"]
        assert "arr_coc_avg_tokens_per_patch" in httpx.get(f"http://127.0.0.1:{page}/metrics").text
    finally:
        servers.stop(process)


def until_200(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(servers.POLL_S)
    raise RuntimeError(f"{url} does not answer: {log.read_text()[-2000:]}")
