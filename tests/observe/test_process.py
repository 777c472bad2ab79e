"""Figures of this process and of several processes, and the cgroup's memory in made folders."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fovea.observe.exposition import CGROUP, PROCESS, ProcessMetrics, cgroup_memory, workers


def values(metrics: ProcessMetrics) -> dict[str, float]:
    return {family.name: family.samples[0].value for family in metrics.collect()}


def test_every_figure_of_a_process_is_exported() -> None:
    found = values(ProcessMetrics())
    assert set(found) >= set(PROCESS)
    assert found["process_resident_memory_bytes"] > 10 * 2**20
    assert 3 <= found["process_open_fds"] < found["process_max_fds"]


def test_workers_are_summed_and_dead_ones_are_not(tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        for name in (
            f"counter_{os.getpid()}",
            f"gauge_livesum_{worker.pid}",
            "histogram_4194305",
            "counter_x",
        ):
            (tmp_path / f"{name}.db").touch()
        assert set(workers(tmp_path)) == {os.getpid(), worker.pid}
        one = values(ProcessMetrics())
        both = values(ProcessMetrics(lambda: workers(tmp_path)))
        assert both["process_resident_memory_bytes"] > one["process_resident_memory_bytes"] / 2
        assert both["process_max_fds"] == 2 * one["process_max_fds"]
        assert both["process_start_time_seconds"] == one["process_start_time_seconds"]
    finally:
        worker.communicate(b"\n")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"": ("500", "1000")}, (500, 1000)),
        ({"": ("500", "max")}, (500, math.inf)),
        ({"": ("900", "1000"), "pod": ("400", "max"), "pod/container": ("300", "600")}, (300, 600)),
        ({"": ("900", "500"), "pod": ("400", "max")}, (400, 500)),
        ({}, None),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_the_lowest_limit_counts_and_the_own_usage(
    files: dict[str, tuple[str, str]], expected: tuple[float, float] | None, version: int, tmp_path: Path
) -> None:
    names = (
        ("memory.usage_in_bytes", "memory.limit_in_bytes")
        if version == 1
        else ("memory.current", "memory.max")
    )
    for folder, texts in files.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        for name, text in zip(names, texts, strict=True):
            (tmp_path / folder / name).write_text(
                "9223372036854771712" if text == "max" and version == 1 else text
            )
    folders = [tmp_path / folder for folder in files]
    assert cgroup_memory(folders) == expected
    found = values(ProcessMetrics(folders=lambda: folders))
    assert (CGROUP.keys() <= found.keys()) == (expected is not None)
