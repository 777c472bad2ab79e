"""Progress while weights load: a bar in a terminal, lines in a log, nothing for small models."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from fovea.cli.loading import LINE_S, Lines, loading_shown
from fovea.core.progress import MIB, Loaded, latest, report, watch
from fovea.engine.engine import Engine

SCRIPT = """
from fovea.cli.loading import loading_shown
from fovea.core.progress import report
with loading_shown():
    for done in range(0, {total} + 1, {total} // 4):
        report(done << 20, {total} << 20)
print("end")
"""


def in_terminal(total: int) -> str:
    """Return what a terminal gets on stderr while a model of so many MiB loads."""
    reader, writer = pty.openpty()
    script = [sys.executable, "-c", SCRIPT.format(total=total)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    subprocess.run(script, stderr=writer, stdout=subprocess.DEVNULL, check=True, timeout=60, env=environment)
    os.close(writer)
    text = b""
    try:
        while part := os.read(reader, 1 << 16):
            text += part
    except OSError:  # the other end is closed
        pass
    os.close(reader)
    return text.decode()


def test_a_terminal_gets_a_bar_with_megabytes_that_vanishes() -> None:
    text = in_terminal(1000)
    assert "weights" in text
    assert "1,000.0/1,000.0 MiB" in text
    assert text.endswith("\x1b[2K"), "the line is erased at the end"


def test_a_small_model_shows_nothing() -> None:
    assert in_terminal(40) == ""


def test_a_log_gets_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    lines = Lines(logging.getLogger("fovea.test"), lambda: now)
    with caplog.at_level("INFO", "fovea.test"):
        for now in (1.0, LINE_S, LINE_S + 1, 2 * LINE_S):
            lines(Loaded(int(now) * MIB, 100 * MIB))
    assert [record.getMessage() for record in caplog.records] == [
        "the model is still loading: 10% of its weights (10 of 100 MiB)",
        "the model is still loading: 20% of its weights (20 of 100 MiB)",
    ]


def test_a_model_reports_from_nothing_to_all_of_its_weights() -> None:
    seen: list[Loaded] = []
    with watch(seen.append), Engine.from_pretrained("fovea-tiny", device="cpu", threads=1, kv_cache_mib=16):
        pass
    assert seen[0].done == 0
    assert seen[-1].percent == 100
    assert seen == sorted(seen)
    assert {each.total for each in seen} == {seen[0].total}
    assert seen[0].total > 10 * MIB
    report(0, 0)
    assert latest() == Loaded(0, 0)
    assert latest().percent == 100  # type: ignore[union-attr]


def test_engines_that_load_side_by_side_are_shown_as_one() -> None:
    """Each of them has its thread. Their reports once took turns, and could break the bar and the start."""
    seen: list[Loaded] = []
    with watch(seen.append), ThreadPoolExecutor(1) as other:
        report(50, 100)
        other.submit(report, 10, 100).result()
        other.submit(report, 100, 100).result()
        report(100, 100)
        report(0, 40)
    assert seen == [(50, 100), (60, 200), (150, 200), (200, 200), (0, 40)]
    report(0, 0)


def test_nobody_watches_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), loading_shown(logging.getLogger("fovea.test")):
        report(1 // 0, 1)
