"""The kernels for AMX on machines without it: its operations as plain functions, see amx_twin.h."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fovea.kernels.native.instruction_sets import InstructionSet, chosen, supported

TWIN = Path(__file__).parent / "amx_twin.h"


def amx_twin() -> InstructionSet | None:
    """The kernels for AMX, compiled for the set that FOVEA_NATIVE_KERNELS chooses, but never for AMX itself.

    None: this is no x86-64 machine with AVX2.
    """
    others = [each for each in supported() if each.machine == "x86_64" and each.name != "amx"]
    picked = chosen()
    best = next((each for each in others if picked and each.name == picked.name), next(iter(others), None))
    if best is None:
        return None
    return replace(best, name="amx_twin", flags=(*best.flags, "-O2", f'-DFOVEA_AMX_TWIN="{TWIN}"'))
