"""The description of an engine, and the folder in which it is installed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

INSIDE = Path(__file__).parents[1] / "inside"
TORCH = "torch==2.13.0"
"""Installed first and pinned: a package with a looser requirement would replace it by a CUDA build."""
SHOWN_LINES = 6


class SetupError(Exception):
    """A peer cannot be installed or started, or its checkpoint cannot be converted.

    The page prints the text.
    """


@dataclass(frozen=True)
class Home:
    """The folder of one engine.

    folder: everything that the engine needs is in it.
    cores: cores of its server, which runs one thread on each.
    """

    folder: Path
    cores: tuple[int, ...]

    @property
    def threads(self) -> int:
        return len(self.cores)

    @property
    def bin(self) -> Path:
        return self.folder / "venv" / "bin"

    @property
    def python(self) -> Path:
        return self.bin / "python"

    @property
    def packages(self) -> Path:
        return next((self.folder / "venv" / "lib").glob("python3*")) / "site-packages"

    @property
    def log(self) -> Path:
        return self.folder / "setup.log"

    def models(self, checkpoint: Path) -> Path:
        """The folder for the conversions of a checkpoint; it is created if necessary."""
        folder = self.folder / checkpoint.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def venv(self, *requirements: str) -> None:
        """Create a venv; install torch, then the requirements."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run("python3", "-m", "venv", "--clear", str(self.folder / "venv"))
        (self.folder / "torch.txt").write_text(TORCH + "\n")
        self.pip(TORCH)
        if requirements:
            self.pip(*requirements)

    def pip(self, *arguments: str, env: Mapping[str, str] = {}) -> None:
        pinned = ("--constraint", str(self.folder / "torch.txt"))
        self.run(str(self.python), "-m", "pip", "install", "--no-cache-dir", *pinned, *arguments, env=env)

    def run(self, *command: str, env: Mapping[str, str] = {}) -> None:
        """Run a command. Raises SetupError with the end of its output if it fails."""
        threads = {"OMP_NUM_THREADS": str(self.threads), "CMAKE_BUILD_PARALLEL_LEVEL": str(self.threads)}
        with self.log.open("ab") as log:
            result = subprocess.run(
                ["nice", "-n", "5", *command], stdout=log, stderr=subprocess.STDOUT, check=False,
                env={**os.environ, **OFFLINE, **threads, **env}, cwd=self.folder,
            )  # fmt: skip
        if result.returncode:
            raise SetupError(f"{Path(command[0]).name} ended with {result.returncode}: {tail(self.log)}")

    def version(self, distribution: str) -> str:
        code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
        result = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=False)
        return result.stdout.strip() or "not installed"


@dataclass(frozen=True)
class Start:
    """The command that starts a server.

    env: environment variables in addition to the usual ones.
    pools_mib: MiB of caches that the server is configured with.
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    pools_mib: int = 0


@dataclass(frozen=True)
class Engine:
    """An engine that is compared.

    title: name on the page.
    precisions: for each precision that is compared, its name in the engine; other precisions are not run.
    recipe: a text that changes when an old installation must not be used any more.
    install: installs the engine into a home.
    convert: converts a checkpoint to a precision, and returns the path that the server reads.
    start: returns the command for that path, a precision and a port.
    versions: returns the versions of the installed packages.
    lacks: for each workload or precision that the engine does not support, the reason.
    limit: what keeps the engine to AVX2, for the page; empty if nothing does.
    folder: name of its folder; empty if that is the name of the engine.
    """

    title: str
    precisions: Mapping[str, str]
    recipe: str
    install: Callable[[Home], None]
    convert: Callable[[Home, Path, str], Path]
    start: Callable[[Home, Path, str, int], Start]
    versions: Callable[[Home], Mapping[str, str]]
    lacks: Mapping[str, str] = field(default_factory=dict)
    limit: str = ""
    folder: str = ""

    def set_up(self, home: Home) -> None:
        """Install the engine, unless it is installed by the same recipe already."""
        marker = home.folder / "installed"
        if marker.exists() and marker.read_text() == self.recipe:
            return
        self.install(home)
        marker.write_text(self.recipe)


C_LIBRARY_AVX2 = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW"}
"""The C library copies memory by AVX-512 otherwise."""
TORCH_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""The switches of torch's own kernels, of oneDNN and of MKL."""


def keep_to_avx2(engine: Engine, switches: Mapping[str, str], *words: str) -> Engine:
    """The engine, started with environment variables that keep it to AVX2.

    words: what else keeps it there, for the page.
    """
    switches = {**switches, **C_LIBRARY_AVX2}

    def start(home: Home, model: Path, precision: str, port: int) -> Start:
        plain = engine.start(home, model, precision, port)
        return replace(plain, env={**plain.env, **switches})

    limit = ", ".join([*words, *(f"`{name}={value}`" for name, value in switches.items())])
    return replace(engine, start=start, limit=limit)


OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
"""No engine downloads anything from a hub or sends usage statistics."""


def tail(log: Path) -> str:
    """The last lines of a log, on one line."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join(line.strip() for line in lines if line.strip())[-600:] if lines else "no output"
