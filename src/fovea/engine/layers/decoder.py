"""One decoder for all text models: a list of layers over a paged KV cache and states.

A step computes a flat list of T rows: one per token, of any sequences. Only mixers need to know to which
sequence a row belongs. Visual tokens are rows whose input embedding comes from the vision tower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from fovea.engine.layers.config import Attention, CrossAttention, DecoderConfig, Dense, Experts
from fovea.engine.layers.experts import ExpertLinear, ExpertsBlock
from fovea.engine.layers.layer import CrossLayer, Layer, PerLayerEmbeddings
from fovea.engine.layers.linear import Embedding, Linear, RMSNorm
from fovea.engine.layers.mixers import QueryKeyValue, RotaryAngles
from fovea.engine.layers.ranks import ALONE, Ranks
from fovea.engine.layers.step import DecoderMemory, DecoderPlan, ImageRows, Step, Taps
from fovea.kernels.base import Kernels, Stack, StackShape
from fovea.kernels.codes import Format


class Decoder(nn.Module):
    """The decoder's embedding table, layers, final norm and rotary positions.

    ranks: the processes that compute it together. Layers of other stages have no weights here.
    """

    ranks: Ranks = ALONE

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size + config.extra_embeddings, config.hidden)
        self.layers = nn.ModuleList(
            build_layer(config, number)
            if number in config.own_layers or isinstance(layer.mixer, CrossAttention)
            else nn.Identity()
            for number, layer in enumerate(config.layers)
        )
        self.norm = RMSNorm(config.hidden, config.eps, centered=config.centered_norms)
        self.rotary = nn.ModuleList(RotaryAngles(rotary) for rotary in config.rotaries)
        self.per_layer = (
            None
            if config.per_layer is None
            else PerLayerEmbeddings(config.hidden, len(config.layers), config.per_layer, config.eps)
        )
        self._stack: Stack | None = None

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings of token ids (T,): (T, hidden)."""
        x: Tensor = self.embed_tokens(ids)
        scale = self.config.embedding_scale
        # The factor is rounded to the model's type, as it was in training.
        # It stays on the host: a copy to a GPU would wait for all work before it.
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)

    def layer_embeddings(self, ids: Tensor, x: Tensor, visual_rows: Tensor | None) -> Tensor | None:
        """Per-layer embeddings of rows, see `PerLayerEmbeddings`; None: the decoder has none."""
        return None if self.per_layer is None else self.per_layer(ids, x, visual_rows)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], ...]:
        """Cosines and sines for each of the rotary positions. positions: (T,) or (3, T)."""
        return tuple(rotary(positions, dtype) for rotary in self.rotary)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        memory: DecoderMemory,
        plan: DecoderPlan,
        visual_rows: Tensor | None = None,
        deepstack: Sequence[Tensor] = (),
        read: Tensor | None = None,
        per_layer: Tensor | None = None,
        images: tuple[ImageRows, ...] = (),
        watch: Callable[[int, Tensor], None] | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """Run all layers. Returns hidden states (rows, hidden) before the final norm.

        x: (T, hidden), input embeddings.
        positions: (T,) or (3, T).
        memory: keys, values and states of all sequences.
        plan: which rows read and write which of them.
        visual_rows: numbers of the rows to which DeepStack features are added; None: there are none.
        deepstack: deepstack[i], (len(visual_rows), hidden), is added to these rows after layer i (DeepStack,
            arXiv 2406.04334).
        read: numbers of the rows that are returned, in any order; None: all T. The last layer computes
            little more than these: of a prompt only the last row is read.
        per_layer: (T, layers, width), what `layer_embeddings` returns.
        images: the rows that see image states.
        watch, taps: see `Step`.
        """
        if taps is not None and read is not None and taps.layers[-1] == len(self.layers):
            whole = self.forward(
                x, positions, memory, plan, visual_rows, deepstack, None, per_layer, images, watch, taps
            )
            return whole[read]
        scale = self.query_scale(positions, x.dtype)
        x = self._run_all(
            x, positions, memory, plan, scale, visual_rows, deepstack, read, per_layer, images, watch, taps
        )
        return self.ranks.bring(x, len(self.layers), now=taps is not None)

    def _run_all(
        self,
        x: Tensor,
        positions: Tensor,
        memory: DecoderMemory,
        plan: DecoderPlan,
        scale: Tensor | None,
        visual_rows: Tensor | None,
        deepstack: Sequence[Tensor],
        read: Tensor | None,
        per_layer: Tensor | None,
        images: tuple[ImageRows, ...],
        watch: Callable[[int, Tensor], None] | None,
        taps: Taps | None,
    ) -> Tensor:
        step = Step(self.angles(positions, x.dtype), plan, memory, scale, per_layer, images, watch, taps)
        first = 0
        if visual_rows is not None:
            for index, features in enumerate(deepstack):
                x = self.run(x, index, index + 1, step).index_add(0, visual_rows, features)
                first = index + 1
        last = len(self.layers)
        if first == last:
            return x if read is None else x[read]
        if read is not None and plan.read:
            x = self.run(x, first, self.config.writing_layers, step, read)
            if not len(read):
                return x
            first, step, read = self.config.writing_layers, step.of_read_rows(read), None
        x = self.run(x, first, last, step, read)
        if taps is not None and taps.layers[-1] == last:
            taps.taken.append(self.ranks.bring(x, last, now=True))
        return x

    def query_scale(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The scale of each row's queries, (T, 1, 1); None: it is 1 for all rows."""
        if self.config.query_scaling is None:
            return None
        beta, period = self.config.query_scaling
        # A stack cannot scale queries. Reading the values of a tensor is fast on a CPU.
        if self._stack is not None and not bool((positions >= period).any()):
            return None
        scale = 1 + beta * torch.log(1 + torch.floor(positions / period))
        return scale.to(dtype)[:, None, None]

    def run(self, x: Tensor, first: int, last: int, step: Step, read: Tensor | None = None) -> Tensor:
        """Run the layers from number `first` to before `last`, which adds no DeepStack features.

        read: numbers of the rows of the last of these layers that are returned; None: all.
        """
        for tap in () if step.taps is None else step.taps.layers:
            if first <= tap < last:
                x, first = self._run(x, first, tap, step), tap
                step.taps.taken.append(self.ranks.bring(x, tap, now=True))  # type: ignore[union-attr]
        return self._run(x, first, last, step, read)

    def _run(self, x: Tensor, first: int, last: int, step: Step, read: Tensor | None = None) -> Tensor:
        if first == last:
            return x if read is None else x[read]
        if self._stack is not None and step.query_scale is None and step.watch is None:
            (pool,), (attention,), (angles,) = step.memory.kv, step.plan.attention, step.angles
            return self._stack(x, first, last, *angles, pool.kv, attention, read)
        own = self.config.own_layers
        for index in range(first, last):
            x, rows = self.ranks.enter(x, index), read if index == last - 1 else None
            if index in own:
                x = self.layers[index](x, step, rows)
            elif rows is not None:  # another stage computes them, and only their number counts here
                x = x[rows]
        return x

    def balance_keys(self, wanted: bool) -> None:
        """Let layers balance their keys when they are packed, or not, see `QueryKeyValue.balance`."""
        for module in self.modules():
            if isinstance(module, QueryKeyValue):
                module.balances = wanted

    def use_stack(self, kernels: Kernels, *, whole: bool = True) -> None:
        """Run the layers as one call, or at least the experts of each layer, if the kernels can.

        whole: this process has all of each layer. Otherwise sums over processes interrupt the layers.
        """
        for layer in self.modules():
            if isinstance(layer, ExpertsBlock):
                layer.use_mixture(kernels)
        shape = self._stack_shape() if whole else None
        on_cpu = self.embed_tokens.weight.device.type == "cpu"
        if shape is not None and (on_cpu or self.config.query_scaling is None):
            layers = cast("Sequence[Layer]", self.layers)
            self._stack = kernels.stack(shape, [layer.stack_layer() for layer in layers])

    @property
    def wait(self) -> str | None:
        """Why a step of the layers waits for the device; None: it does not, so a CUDA graph can record it."""
        waits = (layer.wait for layer in self.modules() if isinstance(layer, ExpertLinear))
        return next((wait for wait in waits if wait), None)

    def _joins_experts(self) -> bool:
        """Whether the experts of every layer are one call, and no layer has one that all rows use."""
        blocks = [layer.mlp for layer in cast("Sequence[Layer]", self.layers)]
        return all(
            isinstance(block, ExpertsBlock) and block.mixture is not None and block.shared_expert is None
            for block in blocks
        )

    def _stack_shape(self) -> StackShape | None:
        """Sizes of the layers if all of them are alike and plain; else None.

        A plain layer has attention, and a dense block or experts that are one call.
        """
        config, first = self.config, self.config.layers[0]
        mixer, block = first.mixer, first.feed_forward
        if any(layer != first for layer in config.layers) or first.sandwich or config.centered_norms:
            return None
        if not isinstance(mixer, Attention) or (isinstance(block, Experts) and not self._joins_experts()):
            return None
        if mixer.gated or mixer.window or 2 * len(config.rotaries[0].inverse) != mixer.head_dim:
            return None
        return StackShape(
            config.hidden,
            mixer.heads,
            mixer.kv_heads,
            mixer.head_dim,
            block.intermediate if isinstance(block, Dense) else 0,
            config.eps,
            mixer.scale,
        )


def build_layer(config: DecoderConfig, number: int) -> nn.Module:
    """Return layer `number` of a decoder, with uninitialised weights."""
    shape = config.layers[number]
    if not isinstance(shape.mixer, CrossAttention):
        return Layer(config, shape, number)
    place = config.places[number]
    assert isinstance(place, int)
    assert isinstance(shape.feed_forward, Dense)
    return CrossLayer(config, shape.mixer, shape.feed_forward, place)


class LanguageHead(nn.Module):
    """The language head: hidden states to logits. A tied head shares its weight with the embedding table.

    ranks: the processes that divide its rows, unless it is tied.
    """

    def __init__(self, config: DecoderConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.tied, self.cap, self.ranks = config.tied, config.logit_cap, ranks
        first, last = ranks.head_rows(config)
        self.lm_head = Linear(config.hidden, 0 if config.tied else last - first, bias=False)

    def tie(self, embedding: Embedding, kernels: Kernels, format: Format | None, *, copy: bool) -> None:
        """Share the weight of the embedding table.

        format: format to which the shared table is quantized; None: it stays plain.
        copy: pack a copy of a plain table for the head. This costs memory, since the plain table stays for
            the embedding, which reads it by row.
        """
        self.lm_head.weight = embedding.weight
        self.lm_head.out_features = embedding.count
        if embedding.quantized is not None:
            self.lm_head.product, self.lm_head.format = embedding.quantized, embedding.format
        elif format is not None:
            self.lm_head.format = format
            table = kernels.quantized_product(embedding.weight.data, None, None, False, format)
            self.lm_head.product = table
            embedding.share(table)
        elif copy:
            self.lm_head.pack(kernels, keep=True)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of hidden states: (rows, hidden) to float32 (rows, vocabulary)."""
        logits: Tensor = self.lm_head(x).float()
        if not self.tied:
            logits = self.ranks.join_logits(logits)
        return logits if not self.cap else torch.tanh(logits / self.cap) * self.cap
