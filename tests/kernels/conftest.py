"""Settings of the kernel tests, and the C++ kernels of every instruction set that this machine can run."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from fovea.kernels.native import build
from fovea.kernels.native.instruction_sets import VARIABLE, InstructionSet, chosen, supported
from fovea.kernels.native.kernels import NativeKernels
from tests.support.amx import amx_twin
from tests.support.programs import need_compiler
from tests.support.thorough import is_thorough


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Use one thread. Threads do not speed up tiny products, and on a busy machine they wait."""
    torch.set_num_threads(1)


def tested_sets() -> list[InstructionSet | None]:
    """The set that the engine would choose, None if there is none, and the twin of AMX.

    In `make test-all` all sets of this CPU.

    To compile one takes 15 to 20 seconds. `make test-portable` names AVX2.
    """
    twin = [each for each in [amx_twin()] if each is not None]
    if os.environ.get(VARIABLE) in (None, "", "on") and is_thorough():
        return [*supported(), *twin] or [None]
    return [chosen(), *twin]


@pytest.fixture(scope="module", params=tested_sets(), ids=lambda each: each.name if each else "no set")
def lib(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The library of an instruction set. Its functions have their signatures."""
    if request.param is None:
        pytest.skip("this machine has no instruction set of the kernels")
    cpp = build._load(request.param)
    if cpp is None:
        need_compiler()
    assert cpp is not None, build.build_failure()
    NativeKernels(cpp)
    return cpp
