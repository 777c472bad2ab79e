"""Runs the tools that check rendered files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fovea.deploy.target import Check

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a check.

    status: "passed", "failed", or "skipped" if the tool is not installed.
    output: what the tool printed; for a skipped check, which tool is missing.
    """

    check: Check
    status: str
    output: str


def find(tool: str) -> str | None:
    """Return the path of a program: beside Python, in PATH, or in /usr/sbin."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"])
    return shutil.which(tool, path=places)


def run(check: Check, folder: Path) -> Outcome:
    """Run one check on the files in a folder."""
    program = find(check.tool)
    if program is None:
        return Outcome(check, "skipped", f"{check.tool} is not installed")
    command = [program, *(part.replace("{dir}", str(folder)) for part in check.arguments)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(check, "failed", f"{check.tool} took longer than {TIMEOUT_S:.0f} seconds")
    output = (done.stdout + done.stderr).strip()
    failed = done.returncode != 0 or (check.silent and output)
    return Outcome(check, "failed" if failed else "passed", output)
