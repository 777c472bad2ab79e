"""The instruction sets that the C++ kernels are compiled for, and which of them this machine gets.

`instruction_sets.json` lists them, the fastest first. CMake reads the same file when a wheel is built.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from fovea.core.errors import ConfigError
from fovea.core.hardware import cpu_flags

log = logging.getLogger("fovea.kernels")
FILE = Path(__file__).parent / "instruction_sets.json"
VARIABLE = "FOVEA_NATIVE_KERNELS"
"""Environment variable: "on" (default), "off", or the name of an instruction set.

With "off" the C++ kernels are not used. With a name they use this set, although the CPU may have a better
one. In both cases Fovea decides as on a machine without the better instructions, so `--dtype auto` is float32
with "off". It is meant for tests and comparisons; `--kernels` chooses kernels in production.
"""
AMX = "amx_tile"
"""The CPU feature of matrix registers. A process may use them only after it has asked the kernel for them."""
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64: number of the call, and its arguments (Documentation/arch/x86/xstate.rst)."""
BF16_UNITS = frozenset({"avx512_bf16", "amx_tile", "bf16"})
"""CPU features with which torch multiplies bfloat16 faster than float32."""
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Other names of machines: Windows' and Apple's."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One of the sets.

    name: its name, also of its library.
    machine: "x86_64" or "aarch64".
    title: what it is, and which processors have it.
    needs: features of the CPU by their names in /proc/cpuinfo.
    flags: options of the compiler, without those that all sets share.
    """

    name: str
    machine: str
    title: str
    needs: frozenset[str]
    flags: tuple[str, ...]


@functools.cache
def instruction_sets() -> tuple[InstructionSet, ...]:
    """Return all sets, of all machines, the fastest first."""
    return tuple(
        InstructionSet(
            entry["name"], entry["machine"], entry["title"], frozenset(entry["needs"]), tuple(entry["flags"])
        )
        for entry in json.loads(FILE.read_text())["sets"]
    )


@functools.cache
def common_flags() -> tuple[str, ...]:
    """Return the options of the compiler that all sets share."""
    return tuple(json.loads(FILE.read_text())["flags"])


def supported() -> tuple[InstructionSet, ...]:
    """Return the sets that this process can run, the fastest first. FOVEA_NATIVE_KERNELS has no influence."""
    machine = platform.machine().lower()
    machine, flags = MACHINES.get(machine, machine), cpu_flags()
    if amx_refusal():
        flags -= {AMX}
    return tuple(each for each in instruction_sets() if each.machine == machine and each.needs <= flags)


@functools.cache
def amx_refusal() -> str:
    """Ask the kernel for the matrix registers of AMX. Return why it refuses them.

    "": it grants them, or this CPU has none.

    The permission belongs to the process and its threads. A fork inherits it, another program does not. Linux
    refuses it before 5.16, and if a thread has a small stack for signals. Sandboxes such as gVisor refuse it.
    """
    if AMX not in cpu_flags():
        return ""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if not libc.syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA):
            return ""
        reason = f"arch_prctl: {os.strerror(ctypes.get_errno())}"
    except (AttributeError, OSError) as error:
        reason = str(error)
    log.warning(
        "this CPU has AMX, but the operating system does not allow it, so AVX-512 is used: %s", reason
    )
    return reason


def chosen() -> InstructionSet | None:
    """Return the set that the kernels use here; None: the CPU has none, or FOVEA_NATIVE_KERNELS is "off".

    Raises ConfigError if FOVEA_NATIVE_KERNELS is not "on", "off" or a set that this CPU can run.
    """
    value, ours = os.environ.get(VARIABLE) or "on", supported()
    if value == "off":
        return None
    if value == "on":
        return ours[0] if ours else None
    for each in ours:
        if each.name == value:
            return each
    accepted = ", ".join(("on", "off", *(each.name for each in ours)))
    known = value in {each.name for each in instruction_sets()}
    reason = f"which this CPU ({platform.machine()}) cannot run" if known else "which is not known"
    raise ConfigError(f"{VARIABLE} is {value!r}, {reason}; accepted here: {accepted}")


def has_bf16_units() -> bool:
    """Whether torch's products of bfloat16 are faster than those of float32 on this CPU.

    False if FOVEA_NATIVE_KERNELS is "off" or names a set without such instructions. Raises ConfigError as
    `chosen` does.
    """
    flags = cpu_flags()
    if os.environ.get(VARIABLE) not in (None, "", "on"):
        picked = chosen()
        flags = picked.needs if picked else frozenset()
    return not flags.isdisjoint(BF16_UNITS)
