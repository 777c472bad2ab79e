"""The roofline: lower bounds for the time of each stage, and the shape of a model for the planner.

It must not import transformers.

The demand follows from the model's shape, not from a measurement of the stage. A multiply and an add are two
operations. Activations, norms and position tables are left out of the bytes; this makes the bounds lower, so
they stay lower bounds.

    linear map (n, k), T rows        2 T n k operations; its weight once per step, as packed or quantized
    attention, P pairs per layer     4 heads head_dim P operations: scores, and the sum over values
    KV, per token                    2 layers kv_heads head_dim itemsize bytes: written once by each row, and
                                     read once per step for each position of each sequence
    head, S rows that sample         2 S vocabulary hidden operations; the table once per step
    sampling                         4 vocabulary bytes per row: float32 logits
    encoder, an image of P patches   2 P (parameters of its linear maps) + 4 hidden (pairs of all blocks)
                                     operations; its weights once
    projector, M merged rows         2 M (parameters) operations; its weights once
    fetch, a data URL                its base64 text and the bytes that come of it
    image decode                     the file, and 3 bytes per pixel
    resize                           3 bytes per pixel of source and of every result
    patchify                         3 bytes per pixel, and the values that the encoder gets

The other stages (schedule, tokenize, detokenize, server, client) are limited neither by memory nor by
arithmetic, so they have no lower bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType

import torch
from torch import nn

from fovea.core.measure import Span
from fovea.engine.layers.config import Attention, DecoderConfig, Experts, GatedDelta, ShortConv
from fovea.engine.layers.experts import ExpertLinear
from fovea.engine.layers.linear import Embedding, Linear, PatchLinear
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.vision.processor.base import VisualPlan
from fovea.kernels.calibrate import PLAIN, Machine
from fovea.kernels.codes import Format
from fovea.kernels.native.products import fuses
from fovea.planner.shape import NO_TOWER, AttentionLayers, CrossLayers, Maps, ModelShape, Tower

LOGIT_BYTES = 4
CHANNELS = 3


@dataclass(frozen=True, slots=True)
class Demand:
    """The work that a stage has to do.

    bytes: bytes that it must read from and write to memory.
    operations: number of arithmetic operations, by the format of the weight that they multiply.
    """

    bytes: float = 0.0
    operations: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Demand) -> Demand:
        names = dict.fromkeys((*self.operations, *other.operations))
        both = {name: self.operations.get(name, 0.0) + other.operations.get(name, 0.0) for name in names}
        return Demand(self.bytes + other.bytes, both)

    def __mul__(self, times: float) -> Demand:
        return Demand(self.bytes * times, {name: count * times for name, count in self.operations.items()})

    def lower_bound(self, machine: Machine) -> LowerBound:
        """Return the least time in which a machine can do this work."""
        return LowerBound(
            self.bytes / machine.bandwidth,
            sum(count / machine.peak(name) for name, count in self.operations.items()),
        )


@dataclass(frozen=True, slots=True)
class LowerBound:
    """The least time of a stage.

    A step takes at least the longer of its two times. The bound of several steps is the sum of their bounds.

    memory_s: seconds that the memory needs for the bytes.
    arithmetic_s: seconds that arithmetic needs for the operations.
    seconds: the bound; by default the larger of the two.
    """

    memory_s: float = 0.0
    arithmetic_s: float = 0.0
    seconds: float = -1.0

    def __post_init__(self) -> None:
        if self.seconds < 0:
            object.__setattr__(self, "seconds", max(self.memory_s, self.arithmetic_s))

    def __add__(self, other: LowerBound) -> LowerBound:
        return LowerBound(
            self.memory_s + other.memory_s,
            self.arithmetic_s + other.arithmetic_s,
            self.seconds + other.seconds,
        )

    @property
    def limit(self) -> str:
        """The resource that takes longer: "memory" or "arithmetic"."""
        return "memory" if self.memory_s >= self.arithmetic_s else "arithmetic"


@dataclass(frozen=True, slots=True)
class LinearMaps:
    """Several linear maps together.

    parameters: sum of n * k, by the name of the weights' format.
    bytes: size of the weights in memory.
    """

    parameters: Mapping[str, int]
    bytes: int

    @classmethod
    def of(cls, layers: Iterable[Linear]) -> LinearMaps:
        """Add up linear layers."""
        parameters: Counter[str] = Counter()
        total = 0
        for layer in layers:
            parameters[name_of(layer.format)] += layer.in_features * layer.out_features
            total += layer.weight_bytes
        return cls(dict(parameters), total)

    def demand(self, rows: float) -> Demand:
        """Return the work of multiplying `rows` rows with every map."""
        return Demand(self.bytes, {name: 2.0 * rows * count for name, count in self.parameters.items()})


class ModelRoofline:
    """The work of each stage of a model.

    formats: formats of the model's weights; None: plain.
    decoder, head, embed, blocks, merged, projector: linear maps of the parts. `embed` cuts an image into
        patches; `merged` are the blocks after a merge of rows inside the tower.
    """

    def __init__(self, model: VisionLanguageModel, kv_token_bytes: int = 0) -> None:
        """kv_token_bytes: bytes of keys and values of a token in all layers; 0: in the model's type."""
        config = model.decoder.config
        projectors = {layer for part in model.projector_modules() for layer in linears(part)}
        encoder = [
            layer for part in model.encoder_modules() for layer in linears(part) if layer not in projectors
        ]
        self._model = model
        # A model for text alone has no embedding of patches.
        self._patch = next((layer for layer in encoder if isinstance(layer, PatchLinear)), None)
        self.formats = {layer.format for layer in linears(model)}
        # Keys and values of image states are computed once with the image, not in the steps of the decoder.
        self.decoder = LinearMaps.of(
            layer for layer in linears(model.decoder.layers) if layer not in projectors
        )
        self.head = LinearMaps.of([model.head.lm_head])
        self.embed = LinearMaps.of([] if self._patch is None else [self._patch])
        merged = {layer for part in model.merged_modules() for layer in linears(part)}
        self.blocks = LinearMaps.of(layer for layer in encoder if layer not in {self._patch, *merged})
        self.merged = LinearMaps.of(merged)
        self.projector = LinearMaps.of(projectors)
        self._kv_bytes = kv_token_bytes or config.kv_bytes_per_token(model.dtype.itemsize)
        self._per_pair = 4.0 * sum(
            len(group.layers) * group.heads.query * group.heads.dim for group in config.kv_groups
        )
        self._logits = LOGIT_BYTES * config.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Size of the weights that answering one request reads, all parts of the model together."""
        parts = (self.decoder, self.head, self.embed, self.blocks, self.merged, self.projector)
        return sum(part.bytes for part in parts)

    def step(self, rows: float, keys: float, pairs: float) -> Demand:
        """Return the work of the decoder's layers in one step.

        rows: tokens.
        keys: positions whose KV is read, counted once per sequence.
        pairs: pairs of a query and a key that it attends to.
        """
        kv = Demand(self._kv_bytes * (rows + keys), {PLAIN: self._per_pair * pairs})
        return self.decoder.demand(rows) + kv

    def logits(self, rows: float) -> Demand:
        """Return the work of the output head for `rows` rows."""
        return self.head.demand(rows)

    def sampling(self, rows: float) -> Demand:
        """Return the work of sampling `rows` tokens."""
        return Demand(self._logits * rows)

    def image(self, plan: VisualPlan, encoded_bytes: int) -> dict[str, Demand]:
        """Return the work of each stage of one image, by the stage's name.

        encoded_bytes: size of the image's file.
        """
        assert self._patch is not None
        shape = self._model.visual_shape(plan)
        source = CHANNELS * plan.width * plan.height
        resized = [CHANNELS * height * width for height, width in plan.sizes]
        attention = Demand(0.0, {PLAIN: 4.0 * shape.hidden * shape.pairs})
        demands = {
            "fetch": Demand(encoded_bytes + 4 * -(-encoded_bytes // 3)),
            "image decode": Demand(encoded_bytes + source),
            "patchify": Demand(
                (resized or [source])[-1]
                + self._model.dtype.itemsize * shape.patches * self._patch.frame_features
            ),
            "encoder": self.embed.demand(shape.patches)
            + self.blocks.demand(shape.rows)
            + self.merged.demand(shape.merged_rows)
            + attention,
            "projector": self.projector.demand(shape.projector_rows),
        }
        if any(size != (plan.height, plan.width) for size in plan.sizes):
            demands["resize"] = Demand(source + sum(resized))
        return demands

    def lower_bounds(self, spans: Iterable[Span], machine: Machine) -> dict[str, LowerBound]:
        """Return the bounds of the stages in recorded spans, by the stage's name, summed over its steps."""
        bounds: dict[str, LowerBound] = {}
        for span in spans:
            notes = span.notes
            if span.name == "head":
                demand = self.logits(notes["rows"])
            elif span.name == "sampling":
                demand = self.sampling(notes["rows"])
            elif "pairs" in notes:
                demand = self.step(notes["rows"], notes["keys"], notes["pairs"])
            else:
                continue
            bound = demand.lower_bound(machine)
            bounds[span.name] = bounds.get(span.name, LowerBound(seconds=0.0)) + bound
        return bounds


def linears(module: nn.Module) -> list[Linear]:
    """Return the linear layers of a module."""
    return [layer for layer in module.modules() if isinstance(layer, Linear)]


def name_of(format: Format | None) -> str:
    """Return the name of a weight format."""
    return PLAIN if format is None else format.name


DELTA_OPERATIONS = 7
"""Operations of a token for each number of a matrix state (arXiv 2412.06464).

The decay is one, and reading the old value, adding the new one and reading the output are two each.
"""


def shape_of(model: VisionLanguageModel, name: str, family: str) -> ModelShape:
    """Return the shape of a model.

    name: hub id, or name of its folder.
    family: `model_type` of its configuration.
    """
    config = model.decoder.config
    parts = dict(_parts(model))
    rest, exact = _others(model, parts)
    experts = next(
        (layer.feed_forward for layer in config.layers if isinstance(layer.feed_forward, Experts)), None
    )
    tower = model.tower_shape()
    return ModelShape(
        name=name,
        family=family,
        hidden=config.hidden,
        vocabulary=config.vocab_size,
        max_positions=config.max_positions,
        layers=len(config.layers),
        maps=_maps(model, parts),
        rest=rest,
        exact=exact,
        tied=config.tied,
        attention=_attention(config),
        experts=0 if experts is None else experts.count,
        active_experts=0 if experts is None else experts.active,
        state=_state(config),
        state_operations=_state_operations(config),
        cross=_cross(config, tower),
        tower=tower or NO_TOWER,
        visual_token_numbers=model.visual_token_bytes // model.dtype.itemsize,
        whole_images=bool(config.whole_images),
    )


def _parts(model: VisionLanguageModel) -> Iterator[tuple[nn.Module, str]]:
    """Yield every module with its part. Later parts of a module replace earlier ones."""
    for module in model.modules():
        yield module, "projector"
    for module in model.decoder.modules():
        yield module, "experts" if isinstance(module, ExpertLinear) else "decoder"
    for module in model.head.modules():
        yield module, "head"
    for part in model.encoder_modules():
        for module in part.modules():
            yield module, "patches" if isinstance(module, PatchLinear) else "encoder"
    for part in model.merged_modules():
        for module in part.modules():
            yield module, "merged"
    decoder = set(model.decoder.modules())
    for part in model.projector_modules():
        for module in part.modules():
            yield module, "cross" if module in decoder else "projector"


def _maps(model: VisionLanguageModel, parts: Mapping[nn.Module, str]) -> Mapping[str, tuple[Maps, ...]]:
    """Linear maps by part, equal ones together."""
    found: dict[str, Counter[Maps]] = {}
    for layer in linears(model):
        if layer is model.head.lm_head and model.head.tied:
            continue
        kind = Maps(
            layer.out_features,
            layer.in_features,
            bias=layer.bias is not None,
            gated=layer.gated and fuses(layer.activation, True),
            plain=isinstance(layer, PatchLinear),
        )
        count = layer.count if isinstance(layer, ExpertLinear) else 1
        found.setdefault(parts[layer], Counter())[kind] += count
    if model.head.tied:
        found["head"] = Counter({Maps(*model.decoder.embed_tokens.weight.shape): 1})
    return MappingProxyType(
        {
            part: tuple(replace(kind, count=count) for kind, count in kinds.items())
            for part, kinds in found.items()
        }
    )


def _others(
    model: VisionLanguageModel, parts: Mapping[nn.Module, str]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Numbers of all parameters outside of linear maps, by part: of the model's type, and float32."""
    rest: Counter[str] = Counter()
    exact: Counter[str] = Counter()
    tables = {module for module in model.decoder.modules() if isinstance(module, Embedding)}
    for module in model.modules():
        if isinstance(module, Linear) or (module is model.decoder.embed_tokens and model.head.tied):
            continue
        part = "embedding" if module in tables else parts[module]
        for parameter in module.parameters(recurse=False):
            stays = parameter.dtype is torch.float32 and model.dtype is not torch.float32
            (exact if stays else rest)[part] += parameter.numel()
    return MappingProxyType(dict(rest)), MappingProxyType(dict(exact))


def _attention(config: DecoderConfig) -> tuple[AttentionLayers, ...]:
    layers: Counter[tuple[int, int, int, int | None]] = Counter()
    stored: Counter[tuple[int, int, int, int | None]] = Counter()
    for layer in config.layers:
        if isinstance(mixer := layer.mixer, Attention):
            kind = mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.window
            layers[kind] += 1
            stored[kind] += mixer.source is None
    return tuple(AttentionLayers(count, stored[kind], *kind) for kind, count in layers.items())


def _state(config: DecoderConfig) -> tuple[int, int]:
    """Numbers of the states of a sequence: of the model's type, and float32."""
    shapes = [item for layer in config.state_shapes() for item in layer]
    return (
        sum(prod(shape) for shape, exact in shapes if not exact),
        sum(prod(shape) for shape, exact in shapes if exact),
    )


def _state_operations(config: DecoderConfig) -> int:
    """Operations of a token in the convolutions and in the updates of matrix states."""
    total = 0
    for layer in config.layers:
        mixer = layer.mixer
        if isinstance(mixer, ShortConv):
            total += 2 * mixer.kernel * config.hidden + 2 * config.hidden  # and two gates
        elif isinstance(mixer, GatedDelta):
            matrix = mixer.value_heads * mixer.key_dim * mixer.value_dim
            total += 2 * mixer.kernel * mixer.channels + DELTA_OPERATIONS * matrix
    return total


def _cross(config: DecoderConfig, tower: Tower | None) -> CrossLayers | None:
    cross = config.cross_attention
    if cross is None or tower is None:
        return None
    return CrossLayers(
        len(config.cross_layers), cross.heads, cross.kv_heads, cross.head_dim, tower.tile_tokens
    )
