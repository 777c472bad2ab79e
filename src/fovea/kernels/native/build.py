"""Loads the C++ kernels of `cpu/`: from the wheel, or compiled on first use by this machine's compiler.

A wheel holds a library for every instruction set of its platform. A source tree has none, so the library is
compiled when it is first needed, with GCC or Clang as a C++17 compiler. If there is no compiler, Fovea uses
torch's kernels, and for pictures Pillow and numpy, and logs a warning. The compiled library is in the user's
cache folder (`$XDG_CACHE_HOME/fovea`). Its name is a digest of its sources and flags. It is loaded only from
a folder that no other user can change; otherwise it is compiled into a folder of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fovea.core.private_files import private_folder, read_private, temporary_folder
from fovea.kernels.native.instruction_sets import InstructionSet, chosen, common_flags

log = logging.getLogger("fovea.kernels")
SOURCES = Path(__file__).parent / "cpu"
HIGHWAY = Path(__file__).parent / "highway"
"""The headers of Google Highway, by which the kernels use vector instructions."""
BUILT = Path(__file__).parent / "lib"
"""The libraries that a wheel brings, NAME.so for each instruction set."""
COMPILERS = ("c++", "g++", "clang++")
BUILD_TIMEOUT_S = 600
LONGEST_FAILURE = 300
LOCK_POLL_S = 0.1
_failures: list[str] = []


def library() -> ctypes.CDLL | None:
    """Return the kernels for this machine; None: the CPU has no instruction set, or there is no compiler.

    A failed build is logged as a warning with its reason, once per process. Raises ConfigError if
    FOVEA_NATIVE_KERNELS has a value that is not accepted, see `instruction_sets.chosen`.
    """
    instructions = chosen()
    return None if instructions is None else _load(instructions)


def build_failure() -> str:
    """Return why the kernels could not be built in this process, in one line; "": they could."""
    return " ".join(_failures[-1].split())[:LONGEST_FAILURE] if _failures else ""


@functools.cache
def _load(instructions: InstructionSet) -> ctypes.CDLL | None:
    built = BUILT / f"{instructions.name}.so"
    if built.exists():
        try:
            loaded = ctypes.CDLL(str(built))
            log.debug("C++ kernels for %s, from the wheel", instructions.title)
            return loaded
        except OSError as error:
            log.warning("the CPU kernels of the wheel cannot be loaded, so they are compiled: %s", error)
    try:
        loaded = ctypes.CDLL(str(cached_library(instructions)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        log.warning("the CPU kernels cannot be used, so slower ones are used instead: %s", detail)
        _failures.append(str(detail).strip())
        return None
    log.debug("C++ kernels for %s, compiled on this machine", instructions.title)
    return loaded


def compiler() -> list[str]:
    """Return the command of the C++ compiler, with the flags that CXX has; empty if there is no compiler."""
    return shlex.split(os.environ.get("CXX", "")) or [c for c in COMPILERS if shutil.which(c)][:1]


def cached_library(instructions: InstructionSet) -> Path:
    """Return the library in the cache folder. Compile it first if it is missing or incomplete."""
    flags = (*common_flags(), *instructions.flags)
    digest = hashlib.sha256(" ".join(flags).encode())
    for file in sorted(path for root in (SOURCES, HIGHWAY) for path in root.rglob("*") if path.is_file()):
        digest.update(file.name.encode() + file.read_bytes())
    folder = cache_folder()
    target = folder / f"{instructions.name}-{digest.hexdigest()[:20]}.so"
    if _is_complete(target):
        return target
    with build_lock(target.with_suffix(".lock")):
        if _is_complete(target):  # another process has compiled it meanwhile
            return target
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            output = compile_kernels(flags, Path(scratch))
            checksum = Path(scratch) / "checksum"
            checksum.write_text(_digest(output.read_bytes()))
            output.chmod(0o700)
            checksum.chmod(0o600)
            # Renaming is atomic: a process that does not wait for the lock finds complete files, or none.
            output.rename(target)
            checksum.rename(_checksum_file(target))
    return target


@contextlib.contextmanager
def build_lock(file: Path) -> Iterator[None]:
    """Hold a lock between processes, so that engines that start together do not all compile the same kernels.

    The lock of a process that ends is free again. After BUILD_TIMEOUT_S the caller continues without it,
    because the other process may have been stopped.
    """
    with file.open("a") as handle:
        file.chmod(0o600)
        give_up = time.monotonic() + BUILD_TIMEOUT_S
        while time.monotonic() < give_up:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_POLL_S)
        yield


def _is_complete(library: Path) -> bool:
    """Whether the library matches its checksum file, and both can be changed by this user only.

    A full disk or a power failure can leave a truncated library. Loading it would end the process instead of
    failing. Files of other users may be left from a time when they could write to the folder.
    """
    try:
        return read_private(_checksum_file(library)).decode("ascii", "replace") == _digest(
            read_private(library)
        )
    except OSError:
        return False


def _checksum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def compile_kernels(flags: tuple[str, ...], folder: Path, command: list[str] | None = None) -> Path:
    """Compile the kernels into `folder` and return the library.

    flags: options of the compiler.
    command: the compiler; None: the one that `compiler` finds.

    Raises FileNotFoundError if there is no compiler, subprocess.SubprocessError if it fails.
    """
    command = command or compiler()
    if not command:
        raise FileNotFoundError(
            f"no C++ compiler: looked for {', '.join(COMPILERS)}; set CXX to name another"
        )

    def run(*arguments: str) -> None:
        subprocess.run(
            [*command, *arguments], check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
        )

    objects = {file: str(folder / f"{file.stem}.o") for file in sorted(SOURCES.glob("*.cpp"))}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(
            lambda file: run(*flags, "-I", str(HIGHWAY), "-c", str(file), "-o", objects[file]), objects
        )
        list(made)
    output = folder / "kernels.so"
    run("-shared", "-pthread", *objects.values(), "-o", str(output))
    return output


def cache_folder() -> Path:
    """Return the folder of libraries. Raises OSError if there is none that only this user can change."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fovea"
    except RuntimeError:  # there is no home folder
        return temporary_folder()
    reason = private_folder(folder)
    if reason is None:
        return folder
    log.warning(
        "the CPU kernels are compiled for this process alone, because the cache folder is not used: %s",
        reason,
    )
    return temporary_folder()
