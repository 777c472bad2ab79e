"""Programs and compiled kernels that tests need beside Python.

A test whose program is missing is skipped, and a line at the end of a run counts such tests for each program
(`tests.support.summary`).
"""

from __future__ import annotations

import pytest

from fovea.deploy.target import find_program
from fovea.kernels.native import build

MISSING = "not installed: "
"""A reason for skipping begins with this, and names of programs follow, with commas between them."""
COMPILER = "a C++ compiler"


def program(name: str) -> str:
    """The path of a program: beside the interpreter, in PATH or in /usr/sbin. Skips the test without it."""
    found = find_program(name)
    if found is None:
        pytest.skip(f"{MISSING}{name}")
    return found


def needs(*names: str) -> pytest.MarkDecorator:
    """A mark for tests that need all of these programs."""
    missing = [name for name in names if find_program(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{MISSING}{', '.join(missing)}")


def need_compiler() -> None:
    """Skip the test without a C++ compiler."""
    if not build.compiler():
        pytest.skip(f"{MISSING}{COMPILER}")


def need_kernels() -> None:
    """Skip the test if the C++ kernels cannot be used here. The reason says why."""
    if build.library() is None:
        if build.chosen() is not None:
            need_compiler()
        pytest.skip(build.build_failure() or "the CPU has none of the instruction sets of the C++ kernels")
