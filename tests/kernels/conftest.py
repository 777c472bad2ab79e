"""Settings of the kernel tests, and the C++ kernels of every instruction set that this machine can run."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from fovea.kernels.native import build
from fovea.kernels.native.instruction_sets import VARIABLE, InstructionSet, chosen, supported
from fovea.kernels.native.kernels import NativeKernels
from tests.support.programs import need_compiler


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Use one thread. Threads do not speed up tiny products, and on a busy machine they wait."""
    torch.set_num_threads(1)


def every_set() -> list[InstructionSet | None]:
    """All sets of this CPU, or the one that FOVEA_NATIVE_KERNELS names; None if there is none."""
    one = chosen()
    return [one] if os.environ.get(VARIABLE) not in (None, "", "on") else [*supported()] or [None]


@pytest.fixture(scope="module", params=every_set(), ids=lambda each: each.name if each else "no set")
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
