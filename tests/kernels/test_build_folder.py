"""Compiled kernels are loaded only from a folder and from files that no other user can change."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fovea.kernels.native import build
from fovea.kernels.native.instruction_sets import InstructionSet
from tests.support.programs import need_compiler

OTHER = 12345
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
GOOD = 'extern "C" int answer() { return 1; }\n'
PLAIN = InstructionSet("plain", "any", "", frozenset(), ("-fPIC",))
EVIL = b"not even a library, but its checksum fits"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for one short source."""
    need_compiler()
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text(GOOD)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "HIGHWAY", sources)
    monkeypatch.setattr(build, "common_flags", tuple)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fovea"


def plant(library: Path) -> None:
    """Do what the attacker did: put another library, with a checksum that fits, in the library's place."""
    library.write_bytes(EVIL)
    library.with_suffix(".sha256").write_text(build._digest(EVIL))


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


def test_the_library_and_its_folder_are_the_users_alone(cache: Path) -> None:
    library = build.cached_library(PLAIN)
    assert library.parent == cache
    assert [path.stat().st_mode & 0o777 for path in (cache, library, library.with_suffix(".sha256"))] == [
        0o700, 0o700, 0o600,
    ]  # fmt: skip
    assert answer(library) == 1


@pytest.mark.parametrize("shared", ["cache", "cache/fovea"])
def test_a_folder_that_others_may_write_to_is_not_used(
    cache: Path, tmp_path: Path, shared: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a shared XDG_CACHE_HOME, another user put a library there, and its code ran in the server."""
    plant(build.cached_library(PLAIN))
    (tmp_path / shared).chmod(0o777)
    library = build.cached_library(PLAIN)
    assert library.parent != cache
    assert answer(library) == 1
    assert f"others may write to {tmp_path / shared}" in caplog.text


def test_a_link_in_the_place_of_the_folder_is_not_used(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    cache.parent.mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    library = build.cached_library(PLAIN)
    assert not any((tmp_path / "elsewhere").iterdir())
    assert answer(library) == 1
    assert "is a symbolic link" in caplog.text


@ROOT
def test_a_folder_of_another_user_is_not_used(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    plant(build.cached_library(PLAIN))
    os.chown(cache, OTHER, OTHER)
    assert answer(build.cached_library(PLAIN)) == 1
    assert f"belongs to user {OTHER}" in caplog.text


@ROOT
@pytest.mark.parametrize("suffix", [".so", ".sha256"])
def test_a_file_of_another_user_is_replaced(cache: Path, suffix: str) -> None:
    """The folder was open once, and the file that was put there then is still there."""
    library = build.cached_library(PLAIN)
    plant(library)
    os.chown(library.with_suffix(suffix), OTHER, OTHER)
    assert build.cached_library(PLAIN) == library
    assert answer(library) == 1
    assert library.stat().st_uid == os.geteuid()


@pytest.mark.parametrize("mode", [0o722, 0o720])
def test_a_file_that_others_may_write_to_is_replaced(cache: Path, mode: int) -> None:
    library = build.cached_library(PLAIN)
    plant(library)
    library.chmod(mode)
    assert answer(build.cached_library(PLAIN)) == 1


def test_a_link_in_the_place_of_the_library_is_replaced(cache: Path, tmp_path: Path) -> None:
    library = build.cached_library(PLAIN)
    plant(library)
    library.rename(tmp_path / "elsewhere.so")
    library.symlink_to(tmp_path / "elsewhere.so")
    assert answer(build.cached_library(PLAIN)) == 1
    assert (tmp_path / "elsewhere.so").read_bytes() == EVIL


def test_processes_that_start_together_compile_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers of one server once compiled the same kernels at the same time, for 20 seconds each."""
    compile_kernels, calls = build.compile_kernels, []

    def compile_slowly(*arguments: Any) -> Path:
        calls.append(arguments)
        time.sleep(0.3)
        return compile_kernels(*arguments)

    monkeypatch.setattr(build, "compile_kernels", compile_slowly)
    with ThreadPoolExecutor(3) as pool:
        libraries = [*pool.map(build.cached_library, [PLAIN] * 3)]
    assert len(calls) == len(set(libraries)) == 1
    assert answer(libraries[0]) == 1


def test_a_process_that_was_stopped_holds_nobody_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build.cached_library(PLAIN)
    library.unlink()
    monkeypatch.setattr(build, "BUILD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(build, "compile_kernels", partial(compile_within, build.compile_kernels))
    with build.build_lock(library.with_suffix(".lock")):
        assert answer(build.cached_library(PLAIN)) == 1


def compile_within(compile_kernels: Callable[..., Path], *arguments: Any) -> Path:
    """Compile with the usual limit, which the test has made too short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "BUILD_TIMEOUT_S", 60)
        return compile_kernels(*arguments)
