"""The bare ASGI proxy of this folder: the lower bound for any gateway on uvicorn and aiohttp."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from proxies.base import Proxy, Start

FOLDER = Path(__file__).parents[1]


def _command(start: Start) -> list[str]:
    return [
        sys.executable, "-m", "uvicorn", "--app-dir", str(FOLDER), "bare:app", "--host", "127.0.0.1",
        "--port", str(start.port), "--http", "httptools", "--loop", "uvloop", "--no-access-log",
        "--log-level", "warning",
    ]  # fmt: skip


PROXY = Proxy(
    "bare",
    "bare ASGI",
    _command,
    lambda: ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("uvicorn", "aiohttp")),
    "no access log",
    lambda start: {"BARE_BACKENDS": ",".join(start.backends)},
)
