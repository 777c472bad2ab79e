"""Runs zig's C++ compiler for one target: `python zig.py TARGET ARGUMENTS...`, as CMake calls a compiler.

TARGET: zig's name of a machine, system and version of its C library, such as x86_64-linux-gnu.2.28.

zig has its own words for the processor. It does not know `-march=armv8.2-a+dotprod`; it says
`-mcpu=generic+v8_2a+dotprod`. Registers of 512 bits are a feature of their own, beside AVX-512.
"""

from __future__ import annotations

import os
import re
import sys

BASES = {"linux": "generic", "macos": "apple_m1"}
"""The least processor of each system. Every Mac with an ARM processor has an M1 or a later one."""


def translated(argument: str, target: str) -> tuple[str, ...]:
    """Return an argument of GCC and Clang in zig's words."""
    if argument == "-mavx512f":
        return ("-mavx512f", "-mevex512")
    matched = re.fullmatch(r"-march=armv8(?:\.(\d))?-a(.*)", argument)
    if not matched:
        return (argument,)
    version, features = matched.groups()
    base = BASES[target.split("-")[1].split(".")[0]]
    return (f"-mcpu={base}{f'+v8_{version}a' if version else ''}{features}",)


def main() -> None:
    target, *arguments = sys.argv[1:]
    command = [sys.executable, "-m", "ziglang", "c++", "-target", target]
    for argument in arguments:
        command += translated(argument, target)
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
