"""Runs prompts through the first layers of the decoder alone, to read what they attend to in an image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fovea.engine.layers.decoder import Decoder
from fovea.engine.layers.layer import Layer
from fovea.engine.layers.mixers import AttentionMixer
from fovea.engine.layers.ranks import Ranks
from fovea.engine.layers.step import DecoderMemory, DecoderPlan, Step
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.sequence import ImageSpan
from fovea.engine.step.positions import mrope_positions, place, plain_positions
from fovea.engine.vision.encoding import VisualFeatures
from fovea.kernels import NO_SLOT
from fovea.kernels.attention import AttentionPlan, Chunk
from fovea.kernels.states import StatePlan, StateRun, state_plan

BLOCK = 16
"""Tokens per block of a run's own KV."""


@contextmanager
def beside_no_step(device: torch.device) -> Iterator[None]:
    """Let no step of the engine run at the same time on a GPU: kernels of both share plans and workspaces.

    A step runs in the default stream, a run in that of the encoder. Neither is waited for on the host.
    """
    if device.type != "cuda":
        yield
        return
    own, steps = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    own.wait_stream(steps)
    yield
    steps.wait_stream(own)


class PromptRun:
    """Prompts with the same image and different ends, on their way through the decoder's first layers.

    The engine's KV is not touched: the run allocates memory of its own. The rows of the first prompt come
    first. Each other prompt has only the rows after the blocks that it shares with the first. A decoder with
    states shares none.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        before: Sequence[int],
        visual: VisualFeatures,
        ends: Sequence[Sequence[int]],
        grid: tuple[int, int],
    ) -> None:
        """before, ends: token ids before the image, and after it for each prompt; no end may be empty.

        visual: features of the image. With places, they are tokens of the full grid.
        grid: (rows, columns) of the visual tokens, or of the full grid.
        """
        decoder, device = model.decoder, model.device
        self._decoder, self._ranks = decoder, model.ranks
        self.done = 0
        self._visual = visual
        self.start, self.count = len(before), len(visual.embeds)
        common = self.start + self.count
        self.lengths = [common + len(end) for end in ends]
        shared = 0 if any(decoder.config.state_shapes()) else common // BLOCK * BLOCK
        first = decoder.embed(torch.tensor([*before, *ends[0]], device=device))
        whole = torch.cat([first[: self.start], visual.embeds, first[self.start :]])
        rests = [decoder.embed(torch.tensor(end, device=device)) for end in ends[1:]]
        self.x = torch.cat([whole, *(part for rest in rests for part in (whole[shared:common], rest))])
        # Each sequence: its first row, its first token, and its blocks.
        self._sequences: list[tuple[int, int, Tensor]] = []
        row = blocks = 0
        for number, length in enumerate(self.lengths):
            begin = shared if number else 0
            own = -(-length // BLOCK) - begin // BLOCK
            table = torch.cat((torch.arange(begin // BLOCK), torch.arange(blocks, blocks + own)))
            self._sequences.append((row, begin, table.to(device)))
            row, blocks = row + length - begin, blocks + own
        longest = _positions(model, visual, self.start, max(self.lengths), grid)
        positions = torch.cat(
            [
                longest[..., begin:length]
                for length, (_, begin, _) in zip(self.lengths, self._sequences, strict=True)
            ],
            dim=-1,
        )
        view = torch.arange(self.start, common, device=device)
        self._view_rows = torch.cat([row + view[view >= begin] - begin for row, begin, _ in self._sequences])
        self._view = torch.cat([view[view >= begin] - self.start for _, begin, _ in self._sequences])
        shape = (blocks,) * len(decoder.config.kv_groups), BLOCK, len(ends), self.x.dtype
        self._step = Step(
            decoder.angles(positions, self.x.dtype),
            DecoderPlan(
                tuple(self._plan(group.window) for group in decoder.config.kv_groups), self._states(device)
            ),
            DecoderMemory.allocate(decoder.config, *shape, device),
            decoder.query_scale(positions, self.x.dtype),
        )
        self._ranks.open_run(self, self._step.memory, *shape)

    def run(self, layers: int) -> None:
        """Run the rows through all layers before number `layers`."""
        with beside_no_step(self.x.device):
            for number in range(self.done, layers):
                self._ranks.announce("run_layer", self.x, number, self._step)
                self.x = self._decoder.run(self.x, number, number + 1, self._step)
                if number < len(self._visual.deepstack):
                    added = self._visual.deepstack[number][self._view]
                    self.x = self.x.index_add(0, self._view_rows, added)
        self.done = max(self.done, layers)

    def attention(self, number: int) -> list[Tensor]:
        """Attention of each prompt's last token in layer `number`, for which `run(number)` was called.

        For each prompt (heads, visual tokens) in float32. A head's attention to all tokens adds up to 1.
        """
        rows = LastRows(self._sequences, self.lengths, (self.start, self.start + self.count))
        self._ranks.announce("attend", self.x, number, self._step, rows)
        return last_attention(self._decoder, self._ranks, self.x, number, self._step, rows)

    def keys(self, number: int) -> Tensor:
        """Rotated keys of the first prompt in a layer that has run, (L, kv_heads, d)."""
        table, length = self._sequences[0][2], self.lengths[0]
        self._ranks.announce("keys", number, self._step, table, length)
        return first_keys(self._ranks, number, self._step, table, length)

    def _plan(self, window: int | None) -> AttentionPlan:
        chunks, slots = [], []
        for length, (row, begin, table) in zip(self.lengths, self._sequences, strict=True):
            places = torch.arange(begin, length, device=table.device)
            limits = None
            if window is not None:
                limits = torch.stack(((places + 1 - window).clamp(min=0), places + 1), 1)
            chunks.append(Chunk(row, length - begin, begin, table, limits))
            slots.append(table[places // BLOCK] * BLOCK + places % BLOCK)
        return AttentionPlan(torch.cat(slots), (), tuple(chunks))

    def _states(self, device: torch.device) -> StatePlan | None:
        if not any(self._decoder.config.state_shapes()):
            return None
        runs = [
            [StateRun(row, length, NO_SLOT, ((length, number),))]
            for number, (length, (row, _, _)) in enumerate(zip(self.lengths, self._sequences, strict=True))
        ]
        return state_plan(runs, device)


class LastRows(NamedTuple):
    """The last rows of prompts, and the keys whose attention is read.

    sequences: first row, first token and blocks of each prompt.
    lengths: tokens of each prompt.
    seen: first token of the image, and the one after the last.
    """

    sequences: list[tuple[int, int, Tensor]]
    lengths: list[int]
    seen: tuple[int, int]


def last_attention(
    decoder: Decoder, ranks: Ranks, x: Tensor, number: int, step: Step, rows: LastRows
) -> list[Tensor]:
    """Attention of the last row of each prompt in layer `number`, see `PromptRun.attention`.

    ranks: the processes of which each computes its own heads.
    """
    layer = cast("Sequence[Layer]", decoder.layers)[number]
    mixer = layer.self_attn
    kv = step.memory.layer_kv(number)
    assert isinstance(kv, Tensor), "a run's own memory has the model's type"
    query = mixer.store(
        own_rows(layer.before(x), mixer), kv, *step.angles[mixer.shape.rotary],
        step.plan.attention[mixer.group].slots,
    )  # fmt: skip
    if step.query_scale is not None:
        query = query * step.query_scale
    results = []
    for length, (row, begin, table) in zip(rows.lengths, rows.sequences, strict=True):
        grouped = query[row + length - begin - 1].float().view(mixer.kv_heads, -1, mixer.dim)
        keys = kv[table].flatten(0, 1)[:length, 0].float()
        products = torch.einsum("hgd,lhd->hgl", grouped, keys) * mixer.scale
        if mixer.shape.window is not None:
            products[..., : -mixer.shape.window] = float("-inf")
        scores = products.softmax(-1).flatten(0, 1)
        results.append(ranks.join_heads(scores[:, slice(*rows.seen)]))
    return results


def first_keys(ranks: Ranks, number: int, step: Step, table: Tensor, length: int) -> Tensor:
    """Rotated keys of a prompt in a layer that has run, see `PromptRun.keys`. table: its blocks."""
    kv = step.memory.layer_kv(number)
    assert isinstance(kv, Tensor)
    return ranks.join_keys(kv[table].flatten(0, 1)[:length, 0], number)


def own_rows(projected: Tensor, mixer: AttentionMixer) -> Tensor:
    """Queries, keys and values without the gates, which are last."""
    return projected[:, : -mixer.heads * mixer.dim] if mixer.shape.gated else projected


def _positions(
    model: VisionLanguageModel, visual: VisualFeatures, start: int, length: int, grid: tuple[int, int]
) -> Tensor:
    """Positions of a prompt with one image whose first visual token is number `start`."""
    count, places = len(visual.embeds), visual.places
    side = model.merge or 1
    full = 0 if places is None else grid[0] * grid[1]
    span = ImageSpan(0, start, count, count, "", (1, grid[0] * side, grid[1] * side), full_tokens=full)
    if model.merge is None:
        positions, _ = plain_positions(length, [span])
    else:
        positions, _ = mrope_positions(length, [span], side)
    if places is not None:
        place(positions, span, places.cpu().numpy().astype(np.int64))
    return torch.from_numpy(np.ascontiguousarray(positions)).to(model.device)
