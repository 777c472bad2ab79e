"""Calls the command as a user does: in this process, or in a process of its own where a test needs that."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fovea.cli.main import main
from tests.support.forks import Fork

TIMEOUT_S = 90.0
FORKED = "import sys\nfrom fovea.cli.main import main\nsys.exit(main())"


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def error_line(self) -> str:
        """The only line of stderr. It must be an error message and no traceback."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("fovea: ")
        return lines[0]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Caller:
    """Runs commands in this process: fovea(*words, stdin=...) returns the outcome."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *words: object, stdin: str = "") -> Outcome:
        self._capsys.readouterr()
        self._monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = int(end.code or 0)
        return Outcome(code, *self._capsys.readouterr())


SHORT = {"OMP_NUM_THREADS": "1", "FOVEA_LAME_DUCK_S": "0"}
"""Variables of commands that start and end quickly."""


def start(*words: object, whole_end: bool = False, **variables: str) -> Fork:
    """Start the command in a process that has already imported everything. Its input is empty.

    whole_end: its interpreter ends as any other, see `tests.support.forks`.
    """
    environment = os.environ | SHORT | variables
    return Fork(FORKED, [str(word) for word in words], environment, whole_end=whole_end)


def interrupt(process: Fork) -> Outcome:
    """Send Ctrl-C, and return the outcome."""
    process.send_signal(signal.SIGINT)
    return finish(process)


def finish(process: Fork) -> Outcome:
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Outcome(process.returncode, out, err)


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true. How long that takes depends on the machine."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.02)


def write_lines(path: Path, *values: Any) -> Path:
    """Write a JSONL file. A value of bytes is written as it is."""
    lines = [value if isinstance(value, bytes) else json.dumps(value).encode() for value in values]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
