"""Memory and CPU features of this machine, read from /proc and /sys with the standard library."""

from __future__ import annotations

import os
from pathlib import Path

from fovea.core.errors import ConfigError

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
NATIVE_KERNELS_VARIABLE = "FOVEA_NATIVE_KERNELS"
"""Environment variable: "on" (default) or "off".

With "off" Fovea decides as on an AVX2 machine: its C++ kernels stay off, and `--dtype auto` is float32. It is
meant for tests and comparisons; `--kernels` chooses kernels in production.
"""
WIDE_VECTORS = ("avx512", "amx", "avx_ne_convert")
"""Prefixes of the instruction sets that an AVX2 machine lacks."""


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


def native_kernels_allowed() -> bool:
    """Return False if FOVEA_NATIVE_KERNELS is "off". Raises ConfigError for any word but "on" and "off"."""
    value = os.environ.get(NATIVE_KERNELS_VARIABLE, "")
    if value not in ("", "on", "off"):
        raise ConfigError(f"{NATIVE_KERNELS_VARIABLE} is {value!r}; accepted: on, off")
    return value != "off"


def kernel_flags() -> frozenset[str]:
    """Return the CPU flags by which Fovea chooses kernels and types.

    They are those of `cpu_flags`, without AVX-512 and AMX if FOVEA_NATIVE_KERNELS is "off".
    """
    flags = cpu_flags()
    if native_kernels_allowed():
        return flags
    return frozenset(flag for flag in flags if not flag.startswith(WIDE_VECTORS))


def has_bf16_units() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AVX-512 or AMX), which is faster than float32."""
    return not kernel_flags().isdisjoint({"avx512_bf16", "amx_tile"})


def instruction_sets() -> tuple[str, ...]:
    """Return the vector instruction sets that compilers may use on this CPU, sorted by name."""
    return tuple(sorted(flag for flag in cpu_flags() if flag.startswith(VECTORS)))
