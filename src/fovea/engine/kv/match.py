"""The result of a search for the longest cached prefix of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix of a sequence whose KV is available, in the pool or in host memory.

    blocks: numbers of the cached blocks, from the start of the sequence on.
    pending: id of the sequence that is computing or loading the next block now; None if there is none.
    part: ("copy", block, rows) or ("load", slot, rows), whose first rows are the next rows of the sequence.
    slots: numbers of the host slots that hold the blocks after `blocks`.
    window_part: (block, rows) like `part`, in the pool of layers with a sliding window.
    state: name of the checkpoint of the state after this prefix; None: there is none, or the model has no
        states.
    """

    blocks: tuple[int, ...]
    pending: str | None = None
    part: tuple[Literal["copy", "load"], int, int] | None = None
    slots: tuple[int, ...] = ()
    window_part: tuple[int, int] | None = None
    state: bytes | None = None
