"""Fovea's gateway, from this source."""

from __future__ import annotations

import sys

from fovea import __version__
from fovea.cli.main import COMMANDS
from proxies.base import Proxy, SetupError, Start


def _command(start: Start) -> list[str]:
    backends = [part for url in start.backends for part in ("--backend", url)]
    return [sys.executable, "-m", "fovea.cli.main", "gateway", *backends, "--port", str(start.port)]


def _version() -> str:
    if "gateway" not in COMMANDS:
        raise SetupError("this source has no command `fovea gateway`")
    return f"fovea {__version__}"


PROXY = Proxy("gateway", "Fovea", _command, _version, "none")
