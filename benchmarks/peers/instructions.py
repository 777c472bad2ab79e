"""The instruction sets that a comparison uses: all that the machine has, or AVX2 at most."""

from __future__ import annotations

from collections.abc import Collection

ALL, AVX2 = "all", "avx2"
CHOICES = (ALL, AVX2)
"""What `--instructions` accepts. Each has a page of its own, with its own targets."""
FILES = {ALL: "peers.json", AVX2: "peers_avx2.json"}
WIDE = ("avx512", "avx10", "amx")
"""Prefixes of the CPU flags of a machine that has more than AVX2 and its extensions."""


def is_wide(flags: Collection[str]) -> bool:
    """Whether a machine with these CPU flags has AVX-512 or AMX."""
    return any(flag.startswith(WIDE) for flag in flags)


def pages(asked: Collection[str], flags: Collection[str]) -> tuple[str, ...]:
    """The names of the pages to write, for those that were asked for.

    A machine without AVX-512 has one page, that of AVX2. Raises ValueError for an unknown name.

    flags: CPU flags of the machine.
    """
    unknown = sorted(set(asked) - set(CHOICES))
    if unknown:
        raise ValueError(f"--instructions is {','.join(unknown)}; accepted: {', '.join(CHOICES)}")
    return tuple(name for name in CHOICES if name in asked) if is_wide(flags) else (AVX2,)
