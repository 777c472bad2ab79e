"""The build of wheels agrees with what the package reads when it runs."""

from __future__ import annotations

import json
import re
import struct
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tools.wheels.check import NATIVE, WheelError, check_mach_o
from tools.wheels.install import TORCH
from tools.wheels.platforms import PLATFORMS
from tools.wheels.zig import translated

from fovea.kernels.native import build, instruction_sets

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CMAKE = (ROOT / "CMakeLists.txt").read_text()
FLAGS = [*instruction_sets.common_flags()]
for each in instruction_sets.instruction_sets():
    FLAGS += each.flags


def test_cmake_builds_the_files_that_the_package_loads() -> None:
    package = ROOT / "src" / "fovea"
    assert f'set(native "${{CMAKE_CURRENT_SOURCE_DIR}}/{build.SOURCES.parent.relative_to(ROOT)}")' in CMAKE
    assert f"DESTINATION {build.BUILT.relative_to(package.parent)})" in CMAKE
    assert f"{NATIVE}/lib" == str(build.BUILT.relative_to(package.parent))
    assert f"${{native}}/{build.HIGHWAY.name}" in CMAKE
    assert instruction_sets.FILE.name in CMAKE
    assert 'SUFFIX ".so"' in CMAKE


def test_flags_of_instruction_sets_are_in_the_json_file_alone() -> None:
    """The kernels of a wheel once could have been compiled otherwise than those of a source install."""
    assert not [flag for flag in FLAGS if flag != "-pthread" and re.search(rf"{re.escape(flag)}\b", CMAKE)]
    assert 'set(CMAKE_CXX_FLAGS_RELEASE "")' in CMAKE


def test_the_json_file_has_what_cmake_reads() -> None:
    content: dict[str, Any] = json.loads(instruction_sets.FILE.read_text())
    names = [each["name"] for each in content["sets"]]
    assert len(set(names)) == len(names)
    assert {each["machine"] for each in content["sets"]} == {each.machine for each in PLATFORMS}
    assert all(not re.search(r'[;$"\\ ]', flag) for flag in FLAGS), "CMake would split or expand these"
    assert all(re.fullmatch(r"\w+", name) for name in names), "names are targets of CMake, and files"


def test_installs_from_source_need_no_compiler() -> None:
    settings = PROJECT["tool"]["scikit-build"]
    assert settings["wheel"]["cmake"] is False
    assert settings["wheel"]["py-api"] == "py3"
    assert PROJECT["tool"]["cibuildwheel"]["config-settings"] == {"wheel.cmake": "true"}


def test_an_editable_install_is_a_path_alone() -> None:
    """An import hook found the installed package first, although PYTHONPATH named another tree."""
    (override,) = PROJECT["tool"]["scikit-build"]["overrides"]
    assert re.fullmatch(override["if"]["state"], "editable")
    assert not re.fullmatch(override["if"]["state"], "wheel")
    assert override["sdist"]["exclude"] == ["*"], "no file for the hook"


def test_the_source_distribution_has_all_that_a_build_needs() -> None:
    included = PROJECT["tool"]["scikit-build"]["sdist"]["include"]
    assert {"/pyproject.toml", "/CMakeLists.txt", "/src"} <= set(included)
    assert all((ROOT / name.lstrip("/")).exists() for name in included)
    assert all((ROOT / name).exists() for name in PROJECT["project"]["license-files"])


def test_torch_is_the_one_of_the_constraints() -> None:
    assert TORCH in (ROOT / "constraints.txt").read_text().splitlines()
    assert TORCH in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("argument", "target", "expected"),
    [
        ("-march=armv8-a", "aarch64-linux-gnu.2.28", ("-mcpu=generic",)),
        ("-march=armv8.2-a+dotprod", "aarch64-linux-gnu.2.28", ("-mcpu=generic+v8_2a+dotprod",)),
        ("-march=armv8.2-a+dotprod", "aarch64-macos.11.0", ("-mcpu=apple_m1+v8_2a+dotprod",)),
        (
            "-march=armv8.2-a+dotprod+bf16+i8mm",
            "aarch64-linux-gnu.2.28",
            ("-mcpu=generic+v8_2a+dotprod+bf16+i8mm",),
        ),
        ("-mavx512f", "x86_64-linux-gnu.2.28", ("-mavx512f", "-mevex512")),
        ("-mavx512bf16", "x86_64-linux-gnu.2.28", ("-mavx512bf16",)),
    ],
)
def test_zig_gets_flags_in_its_own_words(argument: str, target: str, expected: tuple[str, ...]) -> None:
    assert translated(argument, target) == expected


def test_zig_knows_every_flag_for_a_processor() -> None:
    """zig ends at `-march=` with an error about an unknown CPU."""
    for target in PLATFORMS:
        for each in instruction_sets.instruction_sets():
            if each.machine == target.machine:
                words = [word for flag in each.flags for word in translated(flag, target.target)]
                assert not [word for word in words if word.startswith("-march")]


SYSTEM = b"/usr/lib/libSystem.B.dylib"


def mach_o(
    machine: int = 0x0100000C, version: int = 11 << 16, path: bytes = SYSTEM, signature: int = 0x1D
) -> bytes:
    path += b"\0" * (8 - len(path) % 8)
    commands = struct.pack("<6I", 0x32, 24, 1, version, version, 0)
    commands += struct.pack("<6I", 0xC, 24 + len(path), 24, 0, 0, 0) + path
    commands += struct.pack("<4I", signature, 16, 0, 0)
    return struct.pack("<8I", 0xFEEDFACF, machine, 0, 6, 3, len(commands), 0, 0) + commands


def test_a_library_for_macos_is_accepted() -> None:
    check_mach_o("lib/neon.so", mach_o())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (mach_o(machine=0x01000007), "is not a library for macOS on ARM"),
        (mach_o(version=14 << 16), r"needs macOS \(14, 0\)"),
        (mach_o(path=b"/opt/homebrew/lib/libomp.dylib"), "needs /opt/homebrew/lib/libomp.dylib"),
        (mach_o(signature=0x26), "is not signed"),
    ],
    ids=["Intel", "newer macOS", "foreign library", "unsigned"],
)
def test_other_libraries_for_macos_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(WheelError, match=message):
        check_mach_o("lib/neon.so", content)
