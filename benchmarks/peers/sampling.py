"""Which instructions a server executes: the check that an engine is kept to AVX2.

/proc/PID/task/TID/syscall tells where a thread of a stopped process is. The first bytes there tell the
instruction set, because all instructions of AVX, AVX2 and AVX-512 begin with prefixes of their own. This
needs only Linux on x86-64, and it sees machine code that an engine generates as well.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MATRIX, BEYOND, VECTOR, OTHER = "AMX", "beyond AVX2", "AVX and AVX2", "other"
"""Kinds of instructions. `other` are whole numbers, jumps, and vectors of 128 bits in their old encoding."""
EVEX, VEX3, VEX2 = 0x62, 0xC4, 0xC5
"""First bytes of the encodings of AVX-512 and AVX10 (EVEX), and of AVX and AVX2 (VEX)."""
MAP = 2
"""Opcode map of the VEX encoding that has products: 0F 38."""
AMX = frozenset({0x49, 0x4B, 0x5C, 0x5E, 0x6C})
"""Opcodes of AMX in that map."""
NOT_AVX2 = frozenset({*range(0x50, 0x54), 0x72, 0xB0, 0xB1, 0xD2, 0xD3})
"""Other opcodes of that map in VEX encoding that AVX2 lacks: AVX-VNNI (50 to 53, D2, D3), AVX-NE-CONVERT."""
PROC = Path("/proc")
CODE_BYTES = 4
GENERATED = "generated code"

Seen = dict[str, dict[str, int]]
"""How often each kind was seen (`kinds`), and in which files those beyond AVX2 were (`beyond_in`)."""


def kind(code: bytes) -> str:
    """The kind of the instruction that begins with these bytes (at least four)."""
    first = code[0]
    if first == EVEX:
        return BEYOND
    if first == VEX3 and code[1] & 0x1F == MAP and code[3] in AMX:
        return MATRIX
    if first == VEX3:
        return BEYOND if code[1] & 0x1F == MAP and code[3] in NOT_AVX2 else VECTOR
    return VECTOR if first == VEX2 else OTHER


def next_instructions(group: int, proc: Path = PROC) -> Iterator[tuple[str, str]]:
    """The kind of the next instruction of each thread, and the name of the file that it is in.

    Threads inside a system call do not count: they wait. The file is empty but for instructions beyond AVX2.

    group: process group, which is stopped.
    """
    for pid in _processes(group, proc):
        for task in (proc / str(pid) / "task").iterdir():
            with suppress(OSError):  # the thread has ended, or may not be read
                where = (task / "syscall").read_text().split()
                if where[0] != "-1":
                    continue
                address = int(where[2], 16)
                with (proc / str(pid) / "mem").open("rb", buffering=0) as memory:
                    memory.seek(address)
                    found = kind(memory.read(CODE_BYTES))
                yield found, _file(pid, address, proc) if found in (MATRIX, BEYOND) else ""


def _processes(group: int, proc: Path) -> Iterator[int]:
    for path in proc.glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(path.name)) == group:
                yield int(path.name)


def _file(pid: int, address: int, proc: Path) -> str:
    """The name of the file that is mapped at an address."""
    for line in (proc / str(pid) / "maps").read_text().splitlines():
        span, *_, last = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high:
            return Path(last).name if last.startswith("/") else GENERATED
    return GENERATED


class Samples:
    """Counts of instructions."""

    def __init__(self) -> None:
        self._kinds: Counter[str] = Counter()
        self._beyond_in: Counter[str] = Counter()

    def add(self, found: Iterator[tuple[str, str]]) -> None:
        for name, file in found:
            self._kinds[name] += 1
            if file:
                self._beyond_in[file] += 1

    def seen(self) -> Seen:
        """The counts as a JSON object."""
        return {"kinds": dict(self._kinds), "beyond_in": dict(self._beyond_in.most_common(3))}
