"""What a Qwen tower's attention says about an image's visual tokens, for methods that look into the encoder.

Most blocks of Qwen2.5-VL see a window each, and there is no class token to ask: the last block that sees the whole frame tells
how much attention a patch received from all patches. The tower is run again up to that block, which costs what encoding the
image costs; what the encoder handed out does not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from fovea.engine.vision.qwen import Block, QwenVisionTower
from fovea.engine.vision.qwen_segments import QwenPart
from fovea.engine.vision.slices import cuts, finished

QUERY_ROWS = 512


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """Of visual tokens in raster order, float32. attention (N,): received per patch, mean over heads and over the frame's
    queries, so that a frame's patches sum to 1; mean over a token's patches. keys (N, head_dim): mean over heads and
    patches, not rotated, so that what looks alike is alike wherever it is."""

    attention: Tensor
    keys: Tensor


@torch.inference_mode()
def encoder_taps(tower: QwenVisionTower, patches: Tensor, grid: tuple[int, int, int]) -> Taps:
    """patches and grid as the tower takes them."""
    config, geometry = tower.config, tower.geometry(grid)
    tapped = config.full[-1] if config.window else config.depth - 1
    x = QwenPart(tower, geometry, 0, 0)(patches)[0]
    for index, block in enumerate(islice(_blocks(tower), tapped)):
        x = finished(block.slices(x, geometry, geometry.runs(config, index)))
    block = _blocks(tower)[tapped]
    heads = config.heads
    plain = block.attn.qkv(block.norm1(x)).view(len(x), 3 * heads, -1)
    keys = plain[:, heads : 2 * heads].float().mean(1)
    turned = block.attn.kernels.rotate(plain, 2 * heads, geometry.cos, geometry.sin)
    received = [_received(frame[:, :heads], frame[:, heads : 2 * heads]) for frame in turned.chunk(grid[0])]
    # The tower may hold its tokens in another order; the patches of each stand together in any.
    attention, keys = (
        rows.view(-1, config.merge**2, *rows.shape[1:]).mean(1) for rows in (torch.cat(received), keys)
    )
    if geometry.back is not None:
        attention, keys = attention[geometry.back], keys[geometry.back]
    return Taps(attention, keys)


def _blocks(tower: QwenVisionTower) -> list[Block]:
    return cast("list[Block]", list(tower.blocks))


def _received(query: Tensor, key: Tensor) -> Tensor:
    """query, key (T, heads, d) of one frame to what each key got of all queries' attention, (T,) float32: some rows of one
    head at a time, since the whole table of a large image does not fit into memory."""
    count, heads, dim = query.shape
    total = torch.zeros(count, device=query.device)
    for head in range(heads):
        keys = key[:, head].float().T * dim**-0.5
        for rows in cuts(count, QUERY_ROWS):
            total += (query[rows, head].float() @ keys).softmax(-1).sum(0)
    return total / (count * heads)
