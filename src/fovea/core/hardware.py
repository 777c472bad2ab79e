"""Memory, cores and CPU features of this machine, by the standard library.

They are read from /proc and /sys. macOS has neither; there only the CPU features are known, by `sysctl`.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

VECTORS = (
    "sse", "ssse", "avx", "amx", "fma", "f16c", "bmi", "gfni", "vaes", "vpcl", "asimd", "sve", "bf16", "i8mm"
)  # fmt: skip
"""Prefixes of the names of vector instruction sets in /proc/cpuinfo."""
MACOS_FEATURES = {
    "hw.optional.AdvSIMD": "asimd",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
}
"""Names that macOS gives to features of ARM processors, and those in Linux's /proc/cpuinfo."""
FALLBACK_BYTES = 2 * 1024**3
"""Memory that is assumed to be available where the system does not report it."""
NODES = Path("/sys/devices/system/node")
"""Folder with the NUMA nodes of the machine."""
_sharers = 1


def share_machine(count: int) -> None:
    """Note that this process is one of `count` equal ones, which load at the same time.

    Then `available_memory` and the limit of the cgroup are divided by them.
    """
    global _sharers
    _sharers = count


def available_memory() -> int:
    """Return the bytes that this process can allocate without swapping.

    It is MemAvailable, under the limit of the cgroup, divided by the processes of `share_machine`.
    """
    return _free_memory() // _sharers


def _free_memory() -> int:
    free = FALLBACK_BYTES
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        return free
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def usable_cores() -> tuple[int, ...]:
    """Return the numbers of the CPUs that threads should run on: one for each physical core, at least one.

    They are those of `physical_cores`, but not more than the cgroup may use at a time: two with `docker run
    --cpus 2`, however many the machine has. (Threads beyond the limit make each other wait.)
    """
    return physical_cores()[: _cpu_limit()]


def physical_cores() -> tuple[int, ...]:
    """Return the first CPU of each physical core that the process's affinity allows, at least one."""
    return tuple(cpus[0] for cpus in core_cpus())


def core_cpus() -> tuple[tuple[int, ...], ...]:
    """Return the CPUs of each physical core that the process's affinity allows, at least one core."""
    if hasattr(os, "sched_getaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
    else:
        allowed = list(range(os.cpu_count() or 1))
    cores: dict[str, list[int]] = {}
    for cpu in allowed:
        cores.setdefault(_siblings(cpu), []).append(cpu)
    return tuple(map(tuple, cores.values()))


def node_of_cpus(folder: Path = NODES) -> dict[int, int]:
    """Return the number of the NUMA node of each CPU; an empty dict if the system does not tell."""
    nodes: dict[int, int] = {}
    for path in folder.glob("node[0-9]*/cpulist"):
        with suppress(OSError, ValueError):
            number = int(path.parent.name.removeprefix("node"))
            for part in filter(None, path.read_text().strip().split(",")):
                first, _, last = part.partition("-")
                nodes |= dict.fromkeys(range(int(first), int(last or first) + 1), number)
    return nodes


def _siblings(cpu: int) -> str:
    """Return the CPUs of the same physical core, as one text; the CPU itself if the system does not tell."""
    try:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        return topology.read_text().strip()
    except OSError:
        return str(cpu)


def _cpu_limit() -> int | None:
    """Return how many CPUs the process may use at a time, rounded down, at least one; None: no limit.

    The limits of its cgroup and of all above it count, by cpu.max (version 2) and cpu.cfs_quota_us (1). They
    are divided by the processes of `share_machine`.
    """
    limits = [limit for folder in cgroup_folders("cpu") if (limit := _quota(folder)) is not None]
    return max(1, min(limits) // _sharers) if limits else None


def cgroup_folders(controller: str) -> list[Path]:
    """Return the folders that may hold limits of this process. In a container they are the roots.

    controller: cpu or memory.
    """
    root = Path("/sys/fs/cgroup")
    found = [root, root / controller]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        own = base / path.strip("/")
        found += [own, *(parent for parent in own.parents if base in parent.parents)]
    return found


def _quota(folder: Path) -> int | None:
    try:
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except OSError:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return None if quota in ("max", "-1") else max(1, int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None


def cpu_flags() -> frozenset[str]:
    """Return the CPU's features by their names in Linux's /proc/cpuinfo; an empty set if none are known."""
    if platform.system() == "Darwin":
        return _macos_flags()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()


@functools.cache
def _macos_flags() -> frozenset[str]:
    """Return the features of MACOS_FEATURES that `sysctl` reports, by their names on Linux."""
    try:
        command = ["/usr/sbin/sysctl", "hw.optional"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    present = {
        name for name, _, value in (line.partition(": ") for line in told.splitlines()) if value == "1"
    }
    return frozenset(linux for macos, linux in MACOS_FEATURES.items() if macos in present)


def instruction_sets() -> tuple[str, ...]:
    """Return the vector instruction sets that compilers may use on this CPU, sorted by name."""
    return tuple(sorted(flag for flag in cpu_flags() if flag.startswith(VECTORS)))
