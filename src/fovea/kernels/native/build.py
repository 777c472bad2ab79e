"""Compiles the C++ kernels of `cpu/`, once per machine, with the machine's compiler.

They need AVX-512 with BF16, VNNI and VBMI2 (Sapphire Rapids, Zen 4, and later) and GCC as a C++17 compiler.
If the processor lacks these instructions, Fovea uses torch's kernels. If only the compiler is missing, it
does so, too, and logs a warning. The library is in the user's cache folder (`$XDG_CACHE_HOME/fovea`). Its
name is a digest of its sources and flags. It is loaded only from a folder that no other user can change;
otherwise it is compiled into a folder of this process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fovea.core.hardware import kernel_flags
from fovea.core.private_files import private_folder, read_private, temporary_folder

log = logging.getLogger("fovea.kernels")
SOURCES = Path(__file__).parent / "cpu"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl",
         "-mavx512dq", "-mavx512bf16", "-mavx512vbmi", "-mavx512vbmi2", "-mavx512vnni")  # fmt: skip
REQUIRED_FLAGS = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512vbmi", "avx512_vbmi2",
                  "avx512_vnni", "fma"}  # fmt: skip
COMPILERS = ("g++", "c++")
BUILD_TIMEOUT_S = 300


def supported() -> bool:
    """Whether this processor has the instructions, and FOVEA_NATIVE_KERNELS is not "off".

    With FOVEA_NATIVE_KERNELS=off, any machine behaves like one without AVX-512: these kernels are not used,
    and `--dtype auto` is float32 (see `fovea.core.hardware.kernel_flags`). The variable is read whenever a
    model is loaded. Raises ConfigError if it is neither "on" nor "off".
    """
    return kernel_flags() >= REQUIRED_FLAGS


def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if the processor or the compiler does not allow them.

    A failed build is logged as a warning with its reason, once per process. Raises ConfigError as `supported`
    does.
    """
    return _load() if supported() else None


@functools.cache
def _load() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(_build()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        log.warning("the CPU kernels cannot be used, so torch's are used instead: %s", detail)
        return None


def compiler() -> list[str]:
    """Return the command of the C++ compiler, with the flags that CXX has; empty if there is no compiler."""
    return shlex.split(os.environ.get("CXX", "")) or [c for c in COMPILERS if shutil.which(c)][:1]


def _build() -> Path:
    """Return the library in the cache folder. Compile it first if it is missing or incomplete."""
    files = sorted(SOURCES.glob("*.cpp"))
    openmp = _openmp()
    digest = hashlib.sha256(" ".join((*FLAGS, openmp)).encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    folder = _cache_folder()
    target = folder / f"cpu-{digest.hexdigest()[:20]}.so"
    if not _is_complete(target):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            output = _compile(files, openmp, Path(scratch))
            checksum = Path(scratch) / "checksum"
            checksum.write_text(_digest(output.read_bytes()))
            output.chmod(0o700)
            checksum.chmod(0o600)
            # Renaming is atomic. Several processes may build at once, and each of them finds complete files.
            output.rename(target)
            checksum.rename(_checksum_file(target))
    return target


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


def _compile(files: list[Path], openmp: str, scratch: Path) -> Path:
    command = compiler()
    if not command:
        raise FileNotFoundError(
            f"no C++ compiler: looked for {', '.join(COMPILERS)}; set CXX to name another"
        )

    def run(*arguments: str) -> None:
        subprocess.run(
            [*command, *arguments], check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
        )

    objects = {file: str(scratch / f"{file.stem}.o") for file in files}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda file: run(*FLAGS, "-c", str(file), "-o", objects[file]), files))
    output = scratch / "kernels.so"
    run("-shared", *objects.values(), openmp, "-o", str(output))
    return output


def _openmp() -> str:
    """Return the OpenMP library that torch has loaded. A second one would start threads of its own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and Path(fields[5]).name.startswith("libgomp"):
            return fields[5]
    return "-fopenmp"


def _cache_folder() -> Path:
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
