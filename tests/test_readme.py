"""The commands and programs of the README, docs/first-steps.md and docs/python.md run on a real server."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.forks import Fork
from tests.support.programs import needs

pytestmark = pytest.mark.kernels

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FIRST_STEPS = (ROOT / "docs/first-steps.md").read_text()
MOST_WORDS = 1200
"""The README is for someone who has two minutes."""
SERVE = "import sys\nfrom fovea.cli.main import main\nsys.exit(main())"
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "FOVEA_THREADS": "1",
}


def blocks(text: str, language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.S | re.M)


def run(command: list[str]) -> str:
    process = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def python(code: str) -> str:
    process = Fork(code, [], ENVIRONMENT, ROOT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = int(probe.getsockname()[1])
    server = Fork(SERVE, ["serve", "--port", str(number)], ENVIRONMENT, ROOT)
    try:
        for _ in range(600):
            try:
                if httpx.get(f"http://127.0.0.1:{number}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                assert server.poll() is None
            time.sleep(0.1)
        yield number
    finally:
        server.terminate()
        errors = server.communicate(timeout=30)[1]
        assert server.returncode == 0, errors


def test_the_readme_is_short() -> None:
    assert len(re.findall(r"\S*\w\S*", README)) <= MOST_WORDS


def test_first_steps_begin_like_the_readme() -> None:
    """The commands are tested once, so both pages must have the same ones."""
    for beginning in ("fovea ask examples/shapes.png", "There is 1 circle.", "curl"):
        (one,) = (block for block in blocks(README) if block.startswith(beginning))
        assert one.strip() in FIRST_STEPS


def test_ask() -> None:
    command = next(
        line for block in blocks(README) for line in block.splitlines() if line.startswith("fovea ask")
    )
    assert run(["bash", "-c", command]).strip()


@needs("curl")
def test_curl(port: int) -> None:
    command = next(block for block in blocks(README) if block.startswith("curl"))
    body = json.loads(run(["bash", "-c", command.replace("8000", str(port))]))
    assert body["choices"][0]["message"]["content"]
    assert body["usage"]["prompt_tokens_details"]["image_tokens"] > 0


def test_openai_snippet(port: int) -> None:
    (snippet,) = blocks(FIRST_STEPS, "python")
    assert python(snippet.replace("8000", str(port))).strip()


def test_python_page() -> None:
    """All programs of the page run, one after the other, in one process."""
    programs = blocks((ROOT / "docs/python.md").read_text(), "python")
    assert len(programs) == 4
    out = python("\n".join((*programs, "engine.shutdown()\n")))
    assert "There is 1 circle." in out
    assert "Usage(" in out
    assert out.count("circle") >= 3
