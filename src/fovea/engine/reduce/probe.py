"""The first decoder layers over a whole prompt, run for what they show and not for their KV.

FastV and DART in their papers drop tokens between two decoder layers: the layers before hold KV of all tokens, the layers after
of some, and what a block of the cache holds depends on the layer. Here a prompt goes through the first layers once to choose by,
and then, without what was dropped, through all of them from the first on: KV pages are alike in every layer, a follow-up finds
them, and what the first layers compute no longer hears of the dropped tokens. The price is those layers, once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from fovea.core.errors import EngineError
from fovea.engine.layers.decoder import Layer, Step
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.reduce.base import Probe
from fovea.engine.sequence import ImageSpan
from fovea.engine.step.positions import mrope_positions
from fovea.engine.vision.features import VisualFeatures
from fovea.kernels.attention import AttentionPlan, Chunk

LAYERS = 2
BLOCK = 16


def decoder_choosing(model: VisionLanguageModel) -> list[nn.Module]:
    """What of the decoder decides which visual tokens are kept: the words' embeddings, and the layers of a probe."""
    return [model.decoder.embed_tokens, *islice(model.decoder.layers, LAYERS)]


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
    """States of [before, visual tokens, after] when the first `layers` have run; nothing of the engine's KV is touched.

    before, after: token ids; the last of all is the one whose attention is looked at, so `after` must hold one.
    grid: (rows, columns) of the visual tokens, all of which are there. The keys of those layers take memory while it runs.
    """
    decoder, count = model.decoder, visual.embeds.shape[0]
    if not after or not 1 <= layers <= len(decoder.layers):
        raise EngineError(
            f"a probe of {layers} of {len(decoder.layers)} layers with {len(after)} tokens after the image"
        )
    start, length = len(before), len(before) + count + len(after)
    texts = [decoder.embed_tokens(torch.tensor(ids, device=model.device)) for ids in (before, after) if ids]
    x = torch.cat([*texts[:-1], visual.embeds, texts[-1]])
    cos, sin = decoder.rotary(_positions(model, start, length, grid), x.dtype)
    step = Step(cos, sin, _plan(length, model.device))
    blocks = -(-length // BLOCK)
    config = decoder.config
    kv = x.new_empty((blocks, BLOCK, 2, config.kv_heads, config.head_dim))
    places = torch.arange(start, start + count, device=model.device)
    for index, layer in enumerate(islice(cast("Iterable[Layer]", decoder.layers), layers)):
        last = x[-1:]
        x = layer(x, kv, step)
        if index < len(visual.deepstack):
            x = x.index_add(0, places, visual.deepstack[index])
    keys = kv.flatten(0, 1)[:length, 0]
    scores = _attention(layer, last, kv, keys, step)[start : start + count]
    return Probe(decoder.norm(x), keys, scores, start)


def _positions(model: VisionLanguageModel, start: int, length: int, grid: tuple[int, int]) -> Tensor:
    if model.merge is None:
        return torch.arange(length, device=model.device)
    side, count = model.merge, grid[0] * grid[1]
    span = ImageSpan(0, start, count, count, "", (1, grid[0] * side, grid[1] * side))
    positions, _ = mrope_positions(length, [span], side)
    return torch.from_numpy(np.ascontiguousarray(positions)).to(model.device)


def _plan(length: int, device: torch.device) -> AttentionPlan:
    table = torch.arange(-(-length // BLOCK), device=device)
    return AttentionPlan(torch.arange(length, device=device), (), (Chunk(0, length, 0, table),))


def _attention(layer: Layer, last: Tensor, kv: Tensor, keys: Tensor, step: Step) -> Tensor:
    """How much the row `last` (1, hidden), the newest, attends to each key (L, kv_heads, d), mean over heads, (L,) float32."""
    attention = layer.self_attn
    norms = None
    if attention.q_norm is not None and attention.k_norm is not None:
        norms = attention.q_norm.weight, attention.k_norm.weight
    query = attention.kernels.rotate_store(
        layer.before(last).view(1, -1, attention.dim),
        attention.heads,
        step.cos[-1:],
        step.sin[-1:],
        norms,
        attention.eps,
        kv,
        step.attention.slots[-1:],
    )
    grouped = query.float().view(attention.kv_heads, -1, attention.dim)
    products = torch.einsum("hgd,lhd->hgl", grouped, keys.float()) * attention.scale
    scores: Tensor = products.softmax(-1).mean((0, 1))
    return scores
