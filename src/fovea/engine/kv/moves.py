"""What has to happen to KV blocks before a step computes anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Move:
    """The first `rows` rows of a KV block on their way: a copy from block to block, a save from a block to a slot of host
    memory, a load from there to a block. owner: the sequence that relies on it; empty for saves.
    """

    kind: Literal["copy", "save", "load"]
    source: int
    target: int
    rows: int
    owner: str = ""
