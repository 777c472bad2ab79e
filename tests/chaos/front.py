"""Programs that stand before the gateway: the rendered local stack, if `fovea deploy` renders one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Front:
    """A program before the gateway. command: how it is run. port: where it listens."""

    name: str
    command: tuple[str, ...]
    port: int


def rendered_front(folder: Path, port: int, gateway_port: int) -> Front | None:
    """Return the front of the rendered local stack; None: this version renders none."""
    return None
