"""What this machine is, as far as the standard library can tell."""

from __future__ import annotations

from pathlib import Path

VECTORS = (
    "sse",
    "ssse",
    "avx",
    "amx",
    "fma",
    "f16c",
    "bmi",
    "gfni",
    "vaes",
    "vpcl",
    "asimd",
    "sve",
    "bf16",
    "i8mm",
)
"""What the names of vector instruction sets begin with, in /proc/cpuinfo."""
FALLBACK_BYTES = 2 * 1024**3


def available_memory() -> int:
    """Bytes that a process may take without pushing others out: MemAvailable, under the cgroup's own limit."""
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


def cpu_flags() -> frozenset[str]:
    """What this CPU can do, by the names of /proc/cpuinfo; nothing where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()


def instruction_sets() -> tuple[str, ...]:
    """The vector instructions that compilers may use on this CPU, sorted."""
    return tuple(sorted(flag for flag in cpu_flags() if flag.startswith(VECTORS)))
