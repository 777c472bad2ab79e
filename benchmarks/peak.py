"""The rates of a machine's cores in registers, measured by a small C++ program: see peak.cpp."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fovea.kernels.native.build import compiler
from fovea.kernels.native.instruction_sets import InstructionSet

SOURCE = Path(__file__).parent / "peak.cpp"


def peaks(instructions: InstructionSet, threads: int) -> dict[str, float]:
    """Return the rates of `threads` threads together, in billions of operations per second.

    A multiplication and an addition are two operations. "float": of bf16 where the instruction set has them,
    else of float32. "int8": sums of products of bytes, by the best sequence of instructions of the set. On
    AVX2 that sequence is exact only for small values, so the kernels cannot use it: it is a bound. 0: not
    measured on ARM. Raises RuntimeError if there is no compiler.
    """
    if not compiler():
        raise RuntimeError("the rates in registers are measured by a C++ program, and there is no compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "peak.so"
        command = [*compiler(), "-O2", "-std=c++17", "-fPIC", "-shared", *instructions.flags, str(SOURCE)]
        subprocess.run([*command, "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
    rates = {}
    with ThreadPoolExecutor(threads) as pool:
        for name in ("float", "int8"):
            function = getattr(loaded, f"fovea_peak_{name}")
            function.restype = ctypes.c_double
            # ctypes releases the interpreter's lock, so the threads run at the same time.
            rates[name] = sum(pool.map(lambda _, call=function: call(), range(threads)))
    return rates
