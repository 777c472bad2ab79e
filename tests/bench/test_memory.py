"""Memory of a server's processes, from a /proc folder that the test writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fovea.bench.session import Memory, memory_of
from fovea.core.errors import ConfigError


def status(proc: Path, pid: int, parent: int, peak: int, now: int) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "status").write_text(
        f"Name:\tserver x\nPid:\t{pid}\nPPid:\t{parent}\nVmHWM:\t{peak} kB\nVmRSS:\t{now} kB\n"
    )


def test_descendants_count(tmp_path: Path) -> None:
    status(tmp_path, 30, 20, 1024, 512)
    status(tmp_path, 10, 1, 4096, 2048)
    status(tmp_path, 20, 10, 2048, 1024)
    status(tmp_path, 40, 1, 9999, 9999)
    assert memory_of(10, tmp_path) == Memory(7.0, 3.5, 3)
    assert memory_of(30, tmp_path) == Memory(1.0, 0.5, 1)


def test_missing_process(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--pid is 5, and .* shows no such process"):
        memory_of(5, tmp_path)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_memory_of_this_process() -> None:
    memory = memory_of(os.getpid())
    assert memory.peak_mib >= memory.resident_mib > 1
