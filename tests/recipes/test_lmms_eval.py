"""lmms-eval asks a server: `make test-recipes` installs it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.support import MODEL, ROOT, gateway, serve

PYTHON = os.environ.get("FOVEA_TEST_LMMS_EVAL", "")
TASK = ROOT / "examples" / "lmms_eval"

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="FOVEA_TEST_LMMS_EVAL names no interpreter: make test-recipes"
)


@pytest.mark.parametrize("front", ["server", "gateway"])
def test_every_answer_about_the_example_pictures_is_right(tmp_path: Path, front: str) -> None:
    with serve() as server:
        if front == "gateway":
            with gateway(server) as address:
                results = evaluate(address.v1, tmp_path)
        else:
            results = evaluate(server.v1, tmp_path)
    assert results["n-samples"]["pictures"] == {"original": 10, "effective": 10}
    assert results["results"]["pictures"]["right,none"] == 1.0
    (path,) = tmp_path.rglob("*_samples_pictures.jsonl")
    samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(samples) == 10


def evaluate(url: str, folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return what lmms-eval writes about the task of examples/lmms_eval."""
    model = f"model_version={MODEL},base_url={url},api_key=none,timeout=120"
    command = [
        PYTHON,
        "-m",
        "lmms_eval",
        "--model",
        "openai",
        "--model_args",
        model,
        "--include_path",
        str(TASK),
    ]
    command += ["--tasks", "pictures", "--batch_size", "1", "--output_path", str(folder), "--log_samples"]
    environment = {
        "HOME": str(folder), "PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = folder.rglob("*results.json")
    results: dict[str, dict[str, dict[str, float]]] = json.loads(path.read_text())
    return results
