"""The instruction sets that a comparison uses: all that the machine has, or AVX2 at most."""

from __future__ import annotations

from collections.abc import Collection

ALL, AVX2, AMX = "all", "avx2", "amx"
CHOICES = (ALL, AVX2)
"""What `--instructions` accepts."""
FILES = {ALL: "peers.json", AVX2: "peers_avx2.json", AMX: "peers_amx.json"}
"""The file of each page. Each page has its own targets."""
WIDE = ("avx512", "avx10", "amx")
"""Prefixes of the CPU flags of a machine that has more than AVX2 and its extensions."""


def is_wide(flags: Collection[str]) -> bool:
    """Whether a machine with these CPU flags has AVX-512 or AMX."""
    return any(flag.startswith(WIDE) for flag in flags)


def page_of(instructions: str, flags: Collection[str]) -> str:
    """The name of the page of a comparison: with AMX, a separate one if all instructions are used."""
    return AMX if instructions == ALL and "amx_tile" in flags else instructions


def pages(asked: Collection[str], flags: Collection[str]) -> tuple[str, ...]:
    """The instruction sets to compare with, of those that were asked for.

    A machine without AVX-512 gets one page, AVX2. Raises ValueError for an unknown name.

    flags: CPU flags of the machine.
    """
    unknown = sorted(set(asked) - set(CHOICES))
    if unknown:
        raise ValueError(f"--instructions is {','.join(unknown)}; accepted: {', '.join(CHOICES)}")
    return tuple(name for name in CHOICES if name in asked) if is_wide(flags) else (AVX2,)
