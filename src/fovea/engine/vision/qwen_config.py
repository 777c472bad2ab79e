"""Configuration of the Qwen vision towers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QwenVisionConfig:
    """Shape of a Qwen vision tower.

    generation: "2", "2.5" or "3".
    window: side of an attention window in visual tokens; 0: no windows.
    full: numbers of the blocks that attend to the whole frame, where `window` is not 0.
    positions: entries of the learned position table; 0: no learned positions.
    deepstack: numbers of the blocks whose output goes to the decoder's first layers as well.
    """

    generation: str
    depth: int
    hidden: int
    heads: int
    intermediate: int
    out_hidden: int
    activation: str
    channels: int
    patch: int
    temporal: int
    merge: int
    theta: float
    window: int = 0
    full: tuple[int, ...] = ()
    positions: int = 0
    deepstack: tuple[int, ...] = ()
