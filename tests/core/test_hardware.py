"""Available memory and CPU flags of this machine, from simulated files of /proc and /sys."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
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


def cores(
    monkeypatch: pytest.MonkeyPatch, allowed: set[int], siblings: dict[int, str], limit: str | None
) -> tuple[int, ...]:
    contents = {
        f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{text}\n"
        for cpu, text in siblings.items()
    }
    if limit:
        contents["/sys/fs/cgroup/cpu.max"] = f"{limit}\n"
    files(monkeypatch, contents)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: allowed, raising=False)
    return hardware.usable_cores()


PAIRS = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2", 3: "3"}


@pytest.mark.parametrize(
    ("allowed", "siblings", "limit", "expected"),
    [
        ({0, 1, 2}, {}, None, (0, 1, 2)),
        ({0, 1, 2, 3, 4, 5}, PAIRS, "max 100000", (0, 1, 2, 3)),
        ({4, 5}, PAIRS, None, (4, 5)),
        ({0, 1, 2, 3}, PAIRS, "250000 100000", (0, 1)),
        ({0, 1, 2, 3}, PAIRS, "50000 100000", (0,)),
        ({7}, {}, "nonsense", (7,)),
    ],
    ids=["nothing known", "two threads per core", "affinity", "2.5 cores", "half a core", "unknown file"],
)
def test_usable_cores(
    monkeypatch: pytest.MonkeyPatch,
    allowed: set[int],
    siblings: dict[int, str],
    limit: str | None,
    expected: tuple[int, ...],
) -> None:
    """A container with two CPUs on a machine with many once got a thread for each of the machine's."""
    assert cores(monkeypatch, allowed, siblings, limit) == expected


APPLE_M1 = "hw.optional.floatingpoint: 1\nhw.optional.AdvSIMD: 1\nhw.optional.arm.FEAT_DotProd: 1\n"


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    files(monkeypatch, {})
    monkeypatch.setattr(hardware.platform, "system", lambda: "Darwin")
    hardware._macos_flags.cache_clear()
    yield
    hardware._macos_flags.cache_clear()


@pytest.mark.usefixtures("macos")
@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (APPLE_M1 + "hw.optional.arm.FEAT_BF16: 0\n", {"asimd", "asimddp"}),
        (
            APPLE_M1 + "hw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_I8MM: 1\n",
            {"asimd", "asimddp", "bf16", "i8mm"},
        ),
        ("hw.optional.avx2_0: 1\n", set()),
    ],
    ids=["M1", "M2", "Intel"],
)
def test_features_of_processors_on_macos(
    monkeypatch: pytest.MonkeyPatch, told: str, expected: set[str]
) -> None:
    """macOS has no /proc/cpuinfo. Its features get the names that Linux gives them."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout=told, stderr="")

    monkeypatch.setattr(hardware.subprocess, "run", run)
    assert hardware.cpu_flags() == expected


@pytest.mark.usefixtures("macos")
def test_macos_without_sysctl_has_no_known_features(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> None:
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(hardware.subprocess, "run", run)
    assert hardware.cpu_flags() == frozenset()


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 8),
        (
            {
                "/proc/self/cgroup": "0::/system.slice/fovea.service\n",
                "/sys/fs/cgroup/system.slice/fovea.service/cpu.max": "max 100000",
                "/sys/fs/cgroup/system.slice/cpu.max": "300000 100000",
            },
            3,
        ),
        (
            {
                "/proc/self/cgroup": "5:memory:/jobs\n4:cpu,cpuacct:/jobs/one\n",
                "/sys/fs/cgroup/cpu/jobs/one/cpu.cfs_quota_us": "400000",
                "/sys/fs/cgroup/cpu/jobs/one/cpu.cfs_period_us": "100000",
            },
            4,
        ),
    ],
    ids=["version 1", "version 1, no limit", "a folder above", "version 1, a folder"],
)
def test_limits_of_cgroups(monkeypatch: pytest.MonkeyPatch, contents: dict[str, str], expected: int) -> None:
    """Only the file of a container in version 2 was read, so a service with CPUQuota got too many threads."""
    files(monkeypatch, contents)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert len(hardware.usable_cores()) == expected
    assert len(hardware.physical_cores()) == 8
