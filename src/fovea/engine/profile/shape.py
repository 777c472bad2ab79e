"""Reads the shape of a model for the planner. The model needs no weights: torch's meta device is enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

import torch
from torch import nn

from fovea.engine.layers.config import Attention, Experts, GatedDelta, ShortConv
from fovea.engine.layers.experts import ExpertLinear
from fovea.engine.layers.linear import Embedding, Linear, PatchLinear
from fovea.engine.layers.shape import DecoderConfig
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.profile.roofline import linears
from fovea.kernels.native.products import fuses
from fovea.planner.shape import AttentionLayers, CrossLayers, Maps, ModelShape, Tower

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
        tower=tower,
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


def _cross(config: DecoderConfig, tower: Tower) -> CrossLayers | None:
    cross = config.cross_attention
    if cross is None:
        return None
    return CrossLayers(
        len(config.cross_layers), cross.heads, cross.kv_heads, cross.head_dim, tower.tile_tokens
    )
