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

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from fovea.core.errors import EngineError, InvalidRequest
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.look_heads import Head
from fovea.engine.reduce.base import Probe
from fovea.engine.reduce.look import usual_heads
from fovea.engine.reduce.prompt_run import PromptRun
from fovea.engine.vision.any_size import AnySizeTower
from fovea.engine.vision.encoding import VisualFeatures, cuts

QUERY_ROWS = 512
"""Queries whose attention is computed at once."""
LAYERS = 2
"""Number of layers of a probe."""


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

    before, after: token ids. `after` must not be empty: the attention is that of its last token.
    visual: features of all tokens of the image.
    grid: (rows, columns) of the visual tokens.

    Raises EngineError if `after` is empty or there are fewer than `layers` layers.
    """
    if not after or not 1 <= layers <= len(model.decoder.layers):
        raise EngineError(
            f"a probe cannot run {layers} of {len(model.decoder.layers)} layers "
            f"with {len(after)} tokens after the image"
        )
    if model.ranks.stages > 1:
        raise InvalidRequest(
            f"this method reads layers of the decoder while an image is encoded, and pipeline_parallel is "
            f"{model.ranks.stages}; accepted here: methods that read none",
            param="visual_tokens",
        )
    run = PromptRun(model, before, visual, [after], grid)
    run.run(layers - 1)
    [scores] = run.attention(layers - 1)
    run.run(layers)
    return Probe(model.decoder.norm(run.x), run.keys(layers - 1), scores.mean(0), run.start)


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


def probe_modules(model: VisionLanguageModel, heads: Sequence[Head] | None) -> list[nn.Module]:
    """Decoder modules that decide which visual tokens are kept: embeddings, layers of a probe and of a look.

    heads: those that look; None: `look.usual_heads`.
    """
    looking = usual_heads(model.whole) if heads is None else heads
    layers = max(LAYERS, 1 + max((layer for layer, _ in looking), default=0))
    return [model.decoder.embed_tokens, *islice(model.decoder.layers, layers)]
