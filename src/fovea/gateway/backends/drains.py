"""The backends that an operator drains. All workers of a gateway share the list through a small file."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from fovea.gateway.backends.fleet import Fleet


class Drains:
    """The names of drained backends.

    path: file that all workers read; None: there is one worker, and its memory is enough.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._names: frozenset[str] = frozenset()

    def set(self, name: str, *, drain: bool) -> None:
        """Drain a backend, or stop to."""
        self._read()
        self._names = self._names | {name} if drain else self._names - {name}
        if self._path is not None:
            # Replaced as a whole, so that another worker never reads half of it.
            new = self._path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(sorted(self._names)), encoding="utf-8")
            new.replace(self._path)

    def apply(self, fleet: Fleet, now: float) -> None:
        """Drain the backends of the list, and no others. now: the clock in seconds."""
        self._read()
        for backend in fleet:
            drain = backend.name in self._names
            if backend.draining and not drain:
                backend.come_back(now)
            backend.draining = drain

    def _read(self) -> None:
        if self._path is not None:
            with suppress(OSError, ValueError):
                self._names = frozenset(json.loads(self._path.read_text(encoding="utf-8")))
