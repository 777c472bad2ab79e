"""The platforms that wheels are built for."""

from __future__ import annotations

import platform
from dataclasses import dataclass


@dataclass(frozen=True)
class Platform:
    """One of them.

    name: a short name.
    tag: the platform in the wheel's name.
    target: zig's name of machine, system and version of the C library.
    system: CMake's name of the system.
    machine: the machine's name in instruction_sets.json.
    """

    name: str
    tag: str
    target: str
    system: str
    machine: str


PLATFORMS = (
    Platform("x86_64", "manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28", "Linux", "x86_64"),
    Platform("aarch64", "manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28", "Linux", "aarch64"),
    Platform("macos", "macosx_11_0_arm64", "aarch64-macos.11.0", "Darwin", "aarch64"),
)


def is_this_machine(target: Platform) -> bool:
    """Return whether wheels of a platform run on this machine."""
    machine = {"arm64": "aarch64"}.get(platform.machine(), platform.machine())
    return (platform.system(), machine) == (target.system, target.machine)
