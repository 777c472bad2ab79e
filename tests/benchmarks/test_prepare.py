"""A short run of all parts of benchmarks/prepare.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import free_port

BENCHMARK = Path(__file__).parents[2] / "benchmarks/prepare.py"


@pytest.mark.slow
def test_images_are_prepared_in_every_way() -> None:
    command = [sys.executable, str(BENCHMARK), "--images", "4", "--kinds", "page, JPEG", "--cores", "1"]
    done = subprocess.run(
        [*command, "--port", str(free_port())], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    ways = {row["way"] for row in found}
    assert {"in process", "server, chats", "server, known images", "server, uploads", "transformers"} <= ways
    assert all(row["rate"] > 0 and row["ms"] > 0 for row in found)
