"""Available memory and CPU flags of this machine, from simulated files of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.core import hardware

pytestmark = pytest.mark.kernels


def files(monkeypatch: pytest.MonkeyPatch, contents: dict[str, str]) -> None:
    def read(self: Path, *_: object, **__: object) -> str:
        if str(self) not in contents:
            raise FileNotFoundError(self)
        return contents[str(self)]

    monkeypatch.setattr(Path, "read_text", read)


MEMINFO = "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n"


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({}, hardware.FALLBACK_BYTES),
        ({"/proc/meminfo": MEMINFO}, 4000 * 1024),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/sys/fs/cgroup/memory.max": "max",
                "/sys/fs/cgroup/memory.current": "1",
            },
            4000 * 1024,
        ),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/sys/fs/cgroup/memory.max": "3000",
                "/sys/fs/cgroup/memory.current": "1000",
            },
            2000,
        ),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/sys/fs/cgroup/memory.max": "10",
                "/sys/fs/cgroup/memory.current": "30",
            },
            0,
        ),
    ],
    ids=["nothing known", "no cgroup", "no limit", "the container's limit", "over the limit"],
)
def test_available_memory(monkeypatch: pytest.MonkeyPatch, contents: dict[str, str], expected: int) -> None:
    files(monkeypatch, contents)
    assert hardware.available_memory() == expected
