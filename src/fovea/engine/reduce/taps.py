"""Attention and keys of an image's visual tokens in a Qwen tower, for the methods that need them.

There is no class token, and most blocks of Qwen2.5-VL attend only inside windows. So the attention is taken
from the last block in which all patches of a frame attend to each other. The tower runs again up to that
block, which costs about as much as encoding the image. The encoder's output does not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from fovea.engine.vision.qwen import Block, QwenVisionTower
from fovea.engine.vision.qwen_segments import QwenSegment
from fovea.engine.vision.slices import cuts, run_to_end

QUERY_ROWS = 512
"""Queries whose attention is computed at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """Attention and keys of visual tokens, in raster order and float32.

    attention: (N,), attention that a token's patches received, mean over the patches. For a patch it is the
        mean over heads and over all queries of the frame, so that the patches of a frame sum to 1.
    keys: (N, head_dim), mean over heads and over a token's patches. They are not rotated, so that tokens that
        look similar have similar keys, whatever their places.
    """

    attention: Tensor
    keys: Tensor


@torch.inference_mode()
def encoder_taps(tower: QwenVisionTower, patches: Tensor, grid: tuple[int, int, int]) -> Taps:
    """Compute the taps of one image. patches, grid: as for `QwenVisionTower.slices`."""
    config, geometry = tower.config, tower.geometry(grid)
    tapped = config.full[-1] if config.window else config.depth - 1
    x = QwenSegment(tower, geometry, 0, 0)(patches)[0]
    for index, block in enumerate(islice(_blocks(tower), tapped)):
        x = run_to_end(block.slices(x, geometry, geometry.runs(config, index)))
    block = _blocks(tower)[tapped]
    heads = config.heads
    qkv = block.attn.qkv(block.norm1(x)).view(len(x), 3 * heads, -1)
    keys = qkv[:, heads : 2 * heads].float().mean(1)
    rotated = block.attn.kernels.rotate(qkv, 2 * heads, geometry.cos, geometry.sin)
    frames = rotated.chunk(grid[0])
    by_patch = torch.cat([_attention(frame[:, :heads], frame[:, heads : 2 * heads]) for frame in frames])
    # Whatever the tower's order of tokens is, the patches of a token are neighbours.
    attention, keys = (rows.view(-1, config.merge**2, *rows.shape[1:]).mean(1) for rows in (by_patch, keys))
    if geometry.back is not None:
        attention, keys = attention[geometry.back], keys[geometry.back]
    return Taps(attention, keys)


def _blocks(tower: QwenVisionTower) -> list[Block]:
    return cast("list[Block]", list(tower.blocks))


def _attention(query: Tensor, key: Tensor) -> Tensor:
    """Mean attention that each key of one frame receives from all queries, over all heads, (T,) float32.

    It is computed for some rows of one head at a time, since the whole table of a large image does not fit
    into memory.

    query, key: (T, heads, d).
    """
    count, heads, dim = query.shape
    total = torch.zeros(count, device=query.device)
    for head in range(heads):
        keys = key[:, head].float().T * dim**-0.5
        for rows in cuts(count, QUERY_ROWS):
            total += (query[rows, head].float() @ keys).softmax(-1).sum(0)
    return total / (count * heads)
