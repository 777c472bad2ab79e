"""The C++ kernels of `cpu/`, compiled once per machine with the compiler that is there.

They need AVX-512 with BF16, VNNI and VBMI2 (Sapphire Rapids, Zen 4, and later) and GCC as a C++17 compiler. Without the
former Fovea runs on torch's own products; without the latter too, and says so. The library lies in the user's cache folder
(`$XDG_CACHE_HOME/fovea`) under a name made of its sources and flags.
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

log = logging.getLogger("fovea.kernels")
SOURCES = Path(__file__).parent / "cpu"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq",
         "-mavx512bf16", "-mavx512vbmi", "-mavx512vbmi2", "-mavx512vnni")  # fmt: skip
NEEDED = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512vbmi", "avx512_vbmi2", "avx512_vnni",
          "fma"}  # fmt: skip
COMPILERS = ("g++", "c++")
BUILD_TIMEOUT_S = 300


def supported() -> bool:
    """Whether this processor has the instructions, and FOVEA_NATIVE_KERNELS is not "off".

    FOVEA_NATIVE_KERNELS=off shows on any machine what one without AVX-512 does: these kernels are not used, and
    `--dtype auto` is float32 (see `fovea.core.hardware.kernel_flags`). It is read whenever a model is loaded.
    """
    return kernel_flags() >= NEEDED


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None, with a warning that names the reason if they could not be built."""
    return _loaded() if supported() else None


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(_built()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        log.warning("the CPU kernels cannot be used, torch's own take their place: %s", detail)
        return None


def compiler() -> list[str]:
    """The command of the C++ compiler, with CXX's own flags; empty where there is none."""
    return shlex.split(os.environ.get("CXX", "")) or [c for c in COMPILERS if shutil.which(c)][:1]


def _built() -> Path:
    """The library in the cache folder, compiled now if it is not there, or not whole."""
    files = sorted(SOURCES.glob("*.cpp"))
    openmp = _openmp()
    digest = hashlib.sha256(" ".join((*FLAGS, openmp)).encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    folder = _cache_folder()
    target = folder / f"cpu-{digest.hexdigest()[:20]}.so"
    if not _whole(target):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = _compile(files, openmp, Path(scratch))
            mark = Path(scratch) / "mark"
            mark.write_text(_digest(made))
            # Atomic, one after the other: several processes may build at once, and each finds whole files.
            made.rename(target)
            mark.rename(_mark(target))
    return target


def _whole(library: Path) -> bool:
    """A library cut short, by a full disk or a lost power supply, would not fail to load but end the process."""
    try:
        return _mark(library).read_text() == _digest(library)
    except OSError:
        return False


def _mark(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _compile(files: list[Path], openmp: str, scratch: Path) -> Path:
    command = compiler()
    if not command:
        raise FileNotFoundError(f"no C++ compiler, looked for {', '.join(COMPILERS)} (set CXX to name one)")

    def run(*arguments: str) -> None:
        subprocess.run(
            [*command, *arguments], check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
        )

    objects = {file: str(scratch / f"{file.stem}.o") for file in files}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda file: run(*FLAGS, "-c", str(file), "-o", objects[file]), files))
    made = scratch / "kernels.so"
    run("-shared", *objects.values(), openmp, "-o", str(made))
    return made


def _openmp() -> str:
    """The OpenMP library that torch has loaded: a second one would bring threads of its own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and Path(fields[5]).name.startswith("libgomp"):
            return fields[5]
    return "-fopenmp"


def _cache_folder() -> Path:
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "fovea"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # no home, or none that can be written to
        return Path(tempfile.mkdtemp(prefix="fovea-"))
