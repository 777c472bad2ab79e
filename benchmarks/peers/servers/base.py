"""What the run needs to know of an engine, and the folder in which one is set up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

INSIDE = Path(__file__).parents[1] / "inside"
TORCH = "torch==2.13.0"
"""Installed first and held: a looser requirement of a later package would replace it by a CUDA build of gigabytes."""
SHOWN_LINES = 6


class SetupError(Exception):
    """A peer can not be installed, converted for or started. The text says why; it is printed on the page."""


@dataclass(frozen=True)
class Home:
    """folder: everything that an engine needs lives beneath it. cores: of its server, which has a thread on each."""

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
        """Where what was made of a checkpoint is kept."""
        folder = self.folder / checkpoint.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def venv(self, *requirements: str) -> None:
        """A new venv with torch in it, then the requirements."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run("python3", "-m", "venv", "--clear", str(self.folder / "venv"))
        (self.folder / "torch.txt").write_text(TORCH + "\n")
        self.pip(TORCH)
        if requirements:
            self.pip(*requirements)

    def pip(self, *arguments: str, env: Mapping[str, str] = {}) -> None:
        held = ("--constraint", str(self.folder / "torch.txt"))
        self.run(str(self.python), "-m", "pip", "install", "--no-cache-dir", *held, *arguments, env=env)

    def run(self, *command: str, env: Mapping[str, str] = {}) -> None:
        """Raises SetupError with the end of what the command said."""
        threads = {"OMP_NUM_THREADS": str(self.threads), "CMAKE_BUILD_PARALLEL_LEVEL": str(self.threads)}
        with self.log.open("ab") as log:
            done = subprocess.run(
                ["nice", "-n", "5", *command], stdout=log, stderr=subprocess.STDOUT, check=False,
                env={**os.environ, **OFFLINE, **threads, **env}, cwd=self.folder,
            )  # fmt: skip
        if done.returncode:
            raise SetupError(f"{Path(command[0]).name} ended with {done.returncode}: {tail(self.log)}")

    def version(self, distribution: str) -> str:
        code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=False)
        return done.stdout.strip() or "not installed"


@dataclass(frozen=True)
class Start:
    """How a server is started. pools_mib: memory that it was told it may use for caches."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    pools_mib: int = 0


@dataclass(frozen=True)
class Engine:
    """title: its name on the page. precisions: what is compared at each, in the engine's words; what is not there is not run.
    recipe: changes when an installation of before must not be used any more.
    install: into a home. convert: checkpoint and precision to what the server reads. start: that, the
    precision and a port to a command.
    versions: of what was installed. lacks: workload or precision that it has not, and why.
    """

    title: str
    precisions: Mapping[str, str]
    recipe: str
    install: Callable[[Home], None]
    convert: Callable[[Home, Path, str], Path]
    start: Callable[[Home, Path, str, int], Start]
    versions: Callable[[Home], Mapping[str, str]]
    lacks: Mapping[str, str] = field(default_factory=dict)

    def set_up(self, home: Home) -> None:
        """Install unless that was done by the same recipe."""
        done = home.folder / "installed"
        if done.exists() and done.read_text() == self.recipe:
            return
        self.install(home)
        done.write_text(self.recipe)


OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
"""No engine asks a hub for anything, nor tells anyone of the run."""


def tail(log: Path) -> str:
    """The last lines of a log, on one line."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join(line.strip() for line in lines if line.strip())[-600:] if lines else "it said nothing"
