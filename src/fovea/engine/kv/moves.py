"""Copies of KV that must be done before a step computes anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of the first `rows` rows of one KV block.

    kind: "copy" from block to block, "save" from a block to a host slot, "load" from a host slot to a block.
    source: number of the block or slot to read.
    target: number of the block or slot to write.
    rows: how many rows are copied, from the first on.
    owner: id of the sequence that needs the rows; empty for saves.
    windowed: the blocks are those of layers with a sliding window.
    """

    kind: Literal["copy", "save", "load"]
    source: int
    target: int
    rows: int
    owner: str = ""
    windowed: bool = False
