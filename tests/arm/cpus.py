"""Emulated ARM processors, from the one that has least to the one that has most.

qemu's user mode runs any instruction that its `-cpu` has, and ends the process at any other (SIGILL). So
kernels that are tested on the least processor that suffices cannot use an instruction that they must not.
"""

from __future__ import annotations

CPUS = ("cortex-a72", "neoverse-n1", "max,sve=off,sme=off,pauth=off")
"""Values of qemu's `-cpu`, ordered by their features.

cortex-a72: ARMv8.0, plain NEON (Raspberry Pi 4, AWS a1).
neoverse-n1: adds dotprod and fp16 (AWS Graviton 2, Ampere Altra).
max without SVE: adds bf16 and i8mm (Apple M2 has these without SVE, Graviton 3 with it).
"""

FIRST_WORD = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop "
    "sha3 sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg"
)
SECOND_WORD = (
    "dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svef32mm svef64mm svebf16 "
    "i8mm bf16 dgh rng bti mte ecv afp rpres mte3 sme"
)
"""Names that Linux gives to the bits of AT_HWCAP and AT_HWCAP2, from bit 0, in /proc/cpuinfo."""

PROBE = """
import ctypes
value = ctypes.CDLL(None).getauxval
value.argtypes, value.restype = [ctypes.c_ulong], ctypes.c_ulong
print(value(16), value(26))
"""
"""A Python program that prints AT_HWCAP and AT_HWCAP2 of the processor on which it runs."""


def features(hwcap: int, hwcap2: int) -> frozenset[str]:
    """Return the names of the features whose bits are set."""
    words = ((hwcap, FIRST_WORD), (hwcap2, SECOND_WORD))
    return frozenset(
        name for word, names in words for bit, name in enumerate(names.split()) if word >> bit & 1
    )


def cpuinfo(present: frozenset[str]) -> str:
    """Return what /proc/cpuinfo says on a machine with one processor that has these features.

    qemu up to version 8 passes on the file of the machine below, which lists x86 flags.
    """
    ordered = [name for name in f"{FIRST_WORD} {SECOND_WORD}".split() if name in present]
    return (
        f"processor\t: 0\nBogoMIPS\t: 100.00\nFeatures\t: {' '.join(ordered)}\nCPU implementer\t: 0x41\n"
        "CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd08\nCPU revision\t: 3\n\n"
    )


def least(needed: frozenset[str], available: dict[str, frozenset[str]]) -> str:
    """Return the first processor that has the needed features.

    available: the features of each processor, in the order of CPUS. Raises ValueError if none suffices.
    """
    for cpu, present in available.items():
        if needed <= present:
            return cpu
    raise ValueError(
        f"no emulated processor has {', '.join(sorted(needed))}; emulated are: {', '.join(available)}"
    )
