"""Available memory and CPU flags of this machine, from simulated files of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.core import hardware
from fovea.core.errors import ConfigError

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


@pytest.mark.parametrize(
    ("flags", "variable", "expected", "bf16"),
    [
        ("fma avx2 avx512f avx512_bf16 amx_tile", "on", "fma avx2 avx512f avx512_bf16 amx_tile", True),
        ("fma avx2 avx512f avx512_bf16 amx_tile", "", "fma avx2 avx512f avx512_bf16 amx_tile", True),
        ("fma avx2 avx512f avx512_bf16 amx_tile", "off", "fma avx2", False),
        ("fma avx2", "on", "fma avx2", False),
        ("fma avx2 amx_tile", "on", "fma avx2 amx_tile", True),
    ],
)
def test_native_kernels_off_hides_wide_vectors(
    monkeypatch: pytest.MonkeyPatch, flags: str, variable: str, expected: str, bf16: bool
) -> None:
    files(monkeypatch, {"/proc/cpuinfo": f"processor: 0\nflags : {flags}\n"})
    monkeypatch.setenv("FOVEA_NATIVE_KERNELS", variable)
    assert hardware.kernel_flags() == set(expected.split())
    assert hardware.has_bf16_units() is bf16
    assert hardware.cpu_flags() == set(flags.split()), "the flags for compilers do not change"


def test_native_kernels_are_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOVEA_NATIVE_KERNELS", "no")
    with pytest.raises(ConfigError, match="FOVEA_NATIVE_KERNELS is 'no'; accepted: on, off"):
        hardware.native_kernels_allowed()
