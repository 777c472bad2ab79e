"""A checkpoint that is read layer by layer, the rows of calibration prompts in it, and where factors can go.

Inputs of a linear map can be divided by factors if the step before makes them smaller by as much: the weight
of a norm, or rows of the map before. The map's columns are multiplied, so that the layer computes the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fovea.core.errors import CheckpointError, UnsupportedModel
from fovea.engine.layers.config import CrossAttention
from fovea.engine.layers.experts import ExpertLinear
from fovea.engine.layers.layer import Layer
from fovea.engine.layers.linear import FusedLinear, Linear, RMSNorm, checkpoint_targets
from fovea.engine.layers.mixers import AttentionMixer, RotaryAngles
from fovea.engine.layers.step import DecoderMemory, Step
from fovea.engine.load import build_model, read_config, resolve, untie_own_head
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.quantized import open_weights
from fovea.engine.models.stored import STORED_TYPES, StoredWeights
from fovea.engine.models.targets import Fill, assign
from fovea.engine.models.weights import expect_complete, load_weights
from fovea.engine.quantize.record import BLOCK_SIZE, BLOCKS, Sample
from fovea.engine.quantize.search import Moments


class Checkpoint:
    """A plain checkpoint whose tensors are read layer by layer.

    name: see `load.resolve`. Raises CheckpointError, or UnsupportedModel.
    """

    def __init__(self, name: str) -> None:
        self.folder = resolve(name)
        self.config = read_config(self.folder)
        self.stored: StoredWeights = open_weights(self.folder, self.config)
        if self.stored.quantization:
            raise CheckpointError(
                f"{self.folder} is quantized already ({self.stored.quantization}); accepted: a plain one"
            )
        entries = [entry for _, part in self.stored.files for entry in part]
        untie_own_head(self.config, (entry.name for entry in entries))
        self.model: VisionLanguageModel = build_model(
            self.folder, self.config, torch.device("meta"), torch.float32
        )
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.checkpoint_targets()}
        assignment = assign(
            self.stored.files, shapes, self.model.ignored, self.model.renames, self.model.fused_tensors()
        )
        expect_complete(assignment)
        self.fills = assignment.fills

    def expect_calibration(self) -> None:
        """Raise UnsupportedModel if calibration prompts cannot pass the layers one by one."""
        if any(isinstance(layer.mixer, CrossAttention) for layer in self.model.decoder.config.layers):
            raise UnsupportedModel(
                "layers that attend to images cannot be calibrated; accepted: the same command without "
                "--calibrate"
            )

    def load(self, module: nn.Module, prefix: str) -> None:
        """Fill a module of the model, whose attribute path is `prefix`, with its weights."""
        targets = checkpoint_targets(module, f"{prefix}.")
        others = rf"^(?!{re.escape(prefix)}\.)"
        load_weights(
            self.stored,
            targets,
            (*self.model.ignored, others),
            None,
            self.model.renames,
            self.model.fused_tensors(),
        )

    def fills_of(self, prefix: str) -> list[Fill]:
        """Return the tensors of the files that belong to a part of the model."""
        return [fill for fill in self.fills if fill.pieces[0].target.startswith(f"{prefix}.")]

    def read(self, fill: Fill) -> Tensor:
        """Return a tensor of the files as it is stored."""
        assert fill.entry.shape is not None
        tensor = torch.empty(fill.entry.shape, dtype=STORED_TYPES[fill.entry.dtype])
        self.stored.read(fill.file, fill.entry, tensor)
        return tensor


def row_numbers(layer: Linear) -> dict[str, Tensor]:
    """Return the rows of a linear map's weight that each of its checkpoint tensors has, in the tensor's
    order.

    The names are relative to the layer, such as "weight" or "../q_proj.weight".
    """
    weight, bias = layer.weight.data, layer.bias
    layer.weight.data = torch.arange(len(weight), dtype=torch.float32)[:, None].clone()
    layer.bias = None
    try:
        return {name: view.reshape(-1).long() for name, view in layer.checkpoint_views()}
    finally:
        layer.weight.data, layer.bias = weight, bias


class LayerRun:
    """One decoder layer and the rows of all samples before it."""

    def __init__(
        self, model: VisionLanguageModel, layer: nn.Module, number: int, samples: Sequence[Sample]
    ) -> None:
        config = model.decoder.config
        self.layer, self.number, self.samples = layer, number, samples
        blocks = tuple(BLOCKS for _ in config.kv_groups)
        memory = DecoderMemory.allocate(
            config, blocks, BLOCK_SIZE, BLOCKS, torch.float32, torch.device("cpu")
        )
        # All layers use the memory of the first one, so the others never take any.
        places = tuple((place[0], 0) if isinstance(place, tuple) else place for place in memory.places)
        self._memory = replace(memory, places=places)
        self._decoder = model.decoder
        self._rotary = [RotaryAngles(rotary) for rotary in config.rotaries]

    def forward(self, sample: Sample, x: Tensor | None = None) -> Tensor:
        """Return the layer's output rows for a sample. x: its input rows; None: the sample's own."""
        angles = tuple(rotary(sample.positions, torch.float32) for rotary in self._rotary)
        scale = self._decoder.query_scale(sample.positions, torch.float32)
        step = Step(angles, sample.plan, self._memory, scale, sample.per_layer, sample.images)
        out: Tensor = self.layer(sample.x if x is None else x, step)
        if self.number < len(sample.deepstack) and sample.visual_rows is not None:
            out = out.index_add(0, sample.visual_rows, sample.deepstack[self.number])
        return out

    def forget(self) -> None:
        """Detach keys, values and states from the graph of the prompts so far."""
        for pool in self._memory.kv:
            assert isinstance(pool.kv, Tensor)
            pool.kv = pool.kv.detach()
        states = tuple(tuple(tensor.detach() for tensor in layer) for layer in self._memory.states)
        self._memory = replace(self._memory, states=states)

    def inputs(self, maps: Iterable[Linear], visual_weight: float) -> dict[Linear, Moments]:
        """Run all samples, and return the statistics of these maps' inputs.

        visual_weight: weight of rows of images beside rows of text.
        """
        found = {each: Moments.empty(each.in_features) for each in maps}
        importance = torch.ones(0)

        def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            rows = importance if len(importance) == len(x) else torch.ones(len(x))
            found[layer].add(x, rows)  # type: ignore[index]

        hooks = [each.register_forward_pre_hook(note) for each in found]
        try:
            for sample in self.samples:
                importance = torch.where(sample.is_visual(), visual_weight, 1.0)
                self.forward(sample)
        finally:
            for hook in hooks:
                hook.remove()
        return found


def stages(layer: nn.Module) -> list[tuple[Linear, Fold | None]]:
    """Return the linear maps of a layer in the order of computation, and where their factors go."""
    maps = [
        each for each in layer.modules() if isinstance(each, Linear) and not isinstance(each, ExpertLinear)
    ]
    if not isinstance(layer, Layer):
        return [(each, None) for each in maps]
    folds: dict[Linear, Fold] = {}
    mixer, block = layer.mixer, layer.mlp
    if isinstance(mixer, AttentionMixer):
        folds[mixer.qkv] = NormFold(layer.input_layernorm)
        shape = mixer.shape
        if shape.source is None and not (shape.gated or shape.value_norm or shape.shared_values):
            folds[mixer.o_proj] = ValueFold(mixer)
    gate_up, down = getattr(block, "gate_up", None), getattr(block, "down_proj", None)
    if isinstance(gate_up, FusedLinear) and isinstance(down, Linear):
        norm = layer.pre_feedforward_layernorm or layer.post_attention_layernorm
        folds[gate_up], folds[down] = NormFold(norm), RowFold(gate_up, gate_up.out_features // 2)
    return [(each, folds.get(each)) for each in maps]


class NormFold:
    """Divides the weight of the norm before a map."""

    def __init__(self, norm: RMSNorm) -> None:
        self._norm = norm

    def reduce(self, factors: Tensor) -> Tensor:
        return factors

    def apply(self, factors: Tensor, dtype: torch.dtype) -> Tensor:
        """Divide by factors (k,), and round to `dtype`.

        Returns the factors by which the inputs are divided: those that the rounded weight really gives.
        """
        weight, one = self._norm.weight.data, 1.0 if self._norm.centered else 0.0
        before = weight + one
        rounded = ((before / factors - one).to(dtype)).float()
        after = rounded + one
        usable = (before != 0) & (after != 0)
        real = torch.where(usable, before / after, 1.0)
        self._norm.weight.data = torch.where(usable, rounded, weight)
        return real


class RowFold:
    """Divides rows of the map before. first: number of the row that makes the first input."""

    def __init__(self, before: Linear, first: int) -> None:
        self._before, self._first = before, first

    def reduce(self, factors: Tensor) -> Tensor:
        return factors

    def apply(self, factors: Tensor, dtype: torch.dtype) -> Tensor:
        rows = slice(self._first, self._first + len(factors))
        self._before.weight.data[rows] /= factors[:, None]
        if self._before.bias is not None:
            self._before.bias.data[rows] /= factors
        return factors


class ValueFold:
    """Divides the values of attention. The query heads that read one value head get the same factors."""

    def __init__(self, mixer: AttentionMixer) -> None:
        self._mixer = mixer
        self._shape = mixer.kv_heads, mixer.heads // mixer.kv_heads, mixer.dim

    def reduce(self, factors: Tensor) -> Tensor:
        heads = factors.view(self._shape)
        return heads.log().mean(1, keepdim=True).exp().expand_as(heads).reshape(-1)

    def apply(self, factors: Tensor, dtype: torch.dtype) -> Tensor:
        first = (self._mixer.heads + self._mixer.kv_heads) * self._mixer.dim
        own = factors.view(self._shape)[:, 0].reshape(-1)
        RowFold(self._mixer.qkv, first).apply(own, dtype)
        return factors


Fold = NormFold | RowFold | ValueFold
