"""Figures in words."""

from __future__ import annotations

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
MIB, GIB = 1 << 20, 1 << 30


def size(count: float) -> str:
    """Return bytes in the largest unit of which there is at least one."""
    power = 0
    while abs(count) >= 1024 and power < len(UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} {UNITS[0]}" if power == 0 else f"{count:.1f} {UNITS[power]}"


def plural(count: int, noun: str, many: str = "") -> str:
    """Return a number with its noun: "1 error", "2 errors". many: a plural other than with "s"."""
    return f"{count} {noun}" if count == 1 else f"{count} {many or noun + 's'}"
