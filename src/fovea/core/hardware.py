"""Memory and CPU features of this machine, read from /proc and /sys with the standard library."""

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
"""Prefixes of the names of vector instruction sets in /proc/cpuinfo."""
FALLBACK_BYTES = 2 * 1024**3
"""Memory that is assumed to be available where the system does not report it."""


def available_memory() -> int:
    """Return the bytes that a process can allocate without swapping: MemAvailable, under the cgroup limit."""
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
    """Return the CPU's features by their names in /proc/cpuinfo; an empty set if it does not report them."""
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
    """Return the vector instruction sets that compilers may use on this CPU, sorted by name."""
    return tuple(sorted(flag for flag in cpu_flags() if flag.startswith(VECTORS)))
