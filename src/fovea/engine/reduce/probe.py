"""Attention and keys inside encoder and decoder, for the methods that choose visual tokens by them.

`encoder_taps` reads the tower. There is no class token, and most blocks of Qwen2.5-VL attend only inside
windows. So the attention is taken from the last block in which all patches of a frame attend to each other.
The tower runs again up to that block, which costs about as much as encoding the image. The encoder's output
does not change.

`run_probe` reads the decoder. In their papers, FastV and DART drop tokens between two decoder layers. Then
the layers before hold KV of all tokens and the layers after only of some, so a block of the KV cache would
hold different tokens in different layers. Here a prompt first runs through the first layers for the choice
alone. Then the kept tokens run through all layers from the first on. So a block holds the same tokens in
every layer, a follow-up request can reuse it, and even the first layers do not depend on dropped tokens. The
price is one more run of the first layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from fovea.core.errors import EngineError
from fovea.engine.layers.decoder import Decoder
from fovea.engine.layers.layer import Layer
from fovea.engine.layers.step import DecoderMemory, DecoderPlan, Step
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.reduce.base import Probe
from fovea.engine.sequence import ImageSpan
from fovea.engine.step.positions import mrope_positions
from fovea.engine.vision.any_size import AnySizeTower
from fovea.engine.vision.encoding import VisualFeatures, cuts
from fovea.kernels.attention import AttentionPlan, Chunk
from fovea.kernels.pages import KVPool

QUERY_ROWS = 512
"""Queries whose attention is computed at once."""
LAYERS = 2
"""Number of layers of a probe."""
BLOCK = 16
"""Tokens per block of the probe's own KV."""


@torch.inference_mode()
def run_probe(
    model: VisionLanguageModel,
    before: Sequence[int],
    visual: VisualFeatures,
    after: Sequence[int],
    grid: tuple[int, int],
    *,
    layers: int = LAYERS,
) -> Probe:
    """Run the first `layers` layers over the prompt [before, visual tokens, after] and return its states.

    The engine's KV is not touched. The probe allocates KV of its own for one layer at a time.

    before, after: token ids. `after` must not be empty: the attention is that of its last token.
    visual: features of all tokens of the image.
    grid: (rows, columns) of the visual tokens.

    Raises EngineError if `after` is empty or there are fewer than `layers` layers.
    """
    decoder, count = model.decoder, visual.embeds.shape[0]
    if not after or not 1 <= layers <= len(decoder.layers):
        raise EngineError(
            f"a probe cannot run {layers} of {len(decoder.layers)} layers "
            f"with {len(after)} tokens after the image"
        )
    start, length = len(before), len(before) + count + len(after)
    texts = [decoder.embed(torch.tensor(ids, device=model.device)) for ids in (before, after) if ids]
    x = torch.cat([*texts[:-1], visual.embeds, texts[-1]])
    memory = _memory(decoder, -(-length // BLOCK), x)
    angles = decoder.angles(_positions(model, start, length, grid), x.dtype)
    plans = tuple(_plan(length, group.window, model.device) for group in decoder.config.kv_groups)
    step = Step(angles, DecoderPlan(plans), memory)
    places = torch.arange(start, start + count, device=model.device)
    for index, layer in enumerate(islice(cast("Iterable[Layer]", decoder.layers), layers)):
        last = x[-1:]
        x = layer(x, step)
        if index < len(visual.deepstack):
            x = x.index_add(0, places, visual.deepstack[index])
    kv = step.memory.layer_kv(layers - 1)
    assert isinstance(kv, Tensor), "a probe's own memory has the model's type"
    keys = kv.flatten(0, 1)[:length, 0]
    scores = _decoder_attention(layer, last, kv, keys, step)[start : start + count]
    return Probe(decoder.norm(x), keys, scores, start)


@torch.inference_mode()
def encoder_taps(tower: AnySizeTower, patches: Tensor, grid: tuple[int, int, int]) -> Taps:
    """Compute the taps of one image. patches, grid: as for `AnySizeTower.slices`."""
    tapped = tower.tap(patches, grid)
    frames = zip(tapped.query.chunk(grid[0]), tapped.key.chunk(grid[0]), strict=True)
    by_patch = torch.cat([_tower_attention(query, key) for query, key in frames])
    # Whatever the tower's order of tokens is, the patches of a token are neighbours.
    attention, keys = (
        rows.view(-1, tower.merge**2, *rows.shape[1:]).mean(1) for rows in (by_patch, tapped.plain_key)
    )
    if tapped.back is not None:
        attention, keys = attention[tapped.back], keys[tapped.back]
    return Taps(attention, keys)


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


def _tower_attention(query: Tensor, key: Tensor) -> Tensor:
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


def probe_modules(model: VisionLanguageModel) -> list[nn.Module]:
    """Decoder modules that decide which visual tokens are kept: embedding table and layers of a probe."""
    return [model.decoder.embed_tokens, *islice(model.decoder.layers, LAYERS)]


def _memory(decoder: Decoder, blocks: int, x: Tensor) -> DecoderMemory:
    """KV of one layer, which all layers of the probe use one after the other."""
    config = decoder.config
    heads = config.attention_heads
    pool = KVPool((1, blocks, BLOCK), heads.kv, heads.dim, x.dtype, device=x.device)
    return DecoderMemory((pool,), (), ((0, 0),) * len(config.layers))


def _positions(model: VisionLanguageModel, start: int, length: int, grid: tuple[int, int]) -> Tensor:
    if model.merge is None:
        return torch.arange(length, device=model.device)
    side, count = model.merge, grid[0] * grid[1]
    span = ImageSpan(0, start, count, count, "", (1, grid[0] * side, grid[1] * side))
    positions, _ = mrope_positions(length, [span], side)
    return torch.from_numpy(np.ascontiguousarray(positions)).to(model.device)


def _plan(length: int, window: int | None, device: torch.device) -> AttentionPlan:
    table, places = (torch.arange(n, device=device) for n in (-(-length // BLOCK), length))
    limits = None
    if window is not None:
        limits = torch.stack(((places + 1 - window).clamp(min=0), places + 1), 1)
    return AttentionPlan(places, (), (Chunk(0, length, 0, table, limits),))


def _decoder_attention(layer: Layer, last: Tensor, kv: Tensor, keys: Tensor, step: Step) -> Tensor:
    """Attention of the newest row to each key, mean over heads, (L,) float32; 0 for keys before its window.

    last: (1, hidden), input of the layer for that row.
    keys: (L, kv_heads, d).
    """
    attention = layer.self_attn
    cos, sin = step.angles[attention.shape.rotary]
    slot = step.plan.attention[attention.group].slots[-1:]
    query = attention.store(layer.before(last), kv, cos[-1:], sin[-1:], slot)
    grouped = query.float().view(attention.kv_heads, -1, attention.dim)
    products = torch.einsum("hgd,lhd->hgl", grouped, keys.float()) * attention.scale
    if attention.shape.window is not None:
        products[..., : -attention.shape.window] = float("-inf")
    scores: Tensor = products.softmax(-1).mean((0, 1))
    return scores
