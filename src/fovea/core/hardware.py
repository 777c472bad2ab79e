"""What this machine is, as far as the standard library can tell."""

from __future__ import annotations

from pathlib import Path

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
