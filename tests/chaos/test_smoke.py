"""A minute of chaos against the whole stack, and an exit status that says what was found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import program


@pytest.mark.slow
def test_a_minute_of_chaos_breaks_no_invariant(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("it needs root, for a network and disks of its own")
    for name in ("redis-server", "envoy", "setpriv", "unshare"):
        program(name)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- chaos: begin -->\n<!-- chaos: end -->\nafter\n")
    kinds = ["client slices", "kill worker", "stop redis"]
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.chaos.run", "--minutes", "0.5", "--folder", str(tmp_path / "out"),
            "--page", str(page), *(part for kind in kinds for part in ("--only", kind)),
        ],
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "kill worker " in text
    assert "| kill worker | 1 |" in (tmp_path / "out/report.md").read_text()
    assert "No invariant was violated." in text
