"""Checkpoints in the format compressed-tensors, as llm-compressor writes them.

The bits, groups and offsets of a weight follow from the shapes of its tensors. So the names of layers in the
configuration, which may be those of another version of a model, are not needed; but each weight must be of a
scheme that the configuration names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fovea.core.errors import CheckpointError, UnsupportedModel
from fovea.engine.models.quantized.base import (
    ITSELF,
    PLAIN_TYPES,
    Family,
    Fault,
    Part,
    Read,
    Settings,
    Weight,
    checked,
    matrix_shape,
    required,
    small,
)
from fovea.engine.models.quantized.layouts import (
    EvenWeight,
    GridWeight,
    Levels,
    grid_scales,
    group_columns,
    scale_values,
    unpack,
)
from fovea.engine.models.targets import Shape

FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized",
    "mxfp8-quantized", "nvfp4-pack-quantized", "mixed-precision",
)  # fmt: skip
"""Formats that are read, by the names in configurations."""
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
PACKED, SCALE, ZERO = ".weight_packed", ".weight_scale", ".weight_zero_point"
SHAPE, COLUMNS, GLOBAL = ".weight_shape", ".weight_g_idx", ".weight_global_scale"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are quantized, as a group of the configuration says.

    kind: "int" or "float".
    strategy: what a scale belongs to: a name in STRATEGIES.
    group: columns that share a scale, for the strategies with groups.
    block: rows and columns that share a scale, for the strategy "block".
    symmetric: there are no zero points.
    """

    kind: str
    bits: int
    strategy: str
    group: int
    block: tuple[int, int]
    symmetric: bool

    def __str__(self) -> str:
        """Describe the scheme for messages."""
        per = {
            "group": f"in groups of {self.group}",
            "tensor_group": f"in groups of {self.group} with a scale per tensor",
            "block": f"in blocks of {self.block[0]} x {self.block[1]}",
        }.get(self.strategy, f"with a scale per {'row' if self.strategy == 'channel' else 'tensor'}")
        offsets = "" if self.symmetric else ", with zero points"
        return f"{self.kind} of {self.bits} bits {per}{offsets}"

    def groups(self, k: int) -> int:
        """Number of scales of a row of k columns."""
        return -(-k // self.group) if self.strategy in ("group", "tensor_group") else 1


def read_scheme(content: Any, place: str) -> Scheme:
    """Read the part `weights` of a group of the configuration. Raises CheckpointError or UnsupportedModel."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{place}: weights is {str(content)[:50]!r}; accepted: an object")
    settings = Settings(content, place)
    kind = settings.word("type", "int", ("int", "float"))
    bits = settings.whole("num_bits", 8)
    accepted = (2, 4, 8) if kind == "int" else (4, 8)
    if bits not in accepted:
        raise UnsupportedModel(f"{place}: num_bits is {bits}; accepted for {kind}: {accepted}")
    group = settings.whole("group_size") if content.get("group_size") is not None else 0
    strategy = settings.word("strategy", "group" if group > 0 else "tensor", STRATEGIES)
    if strategy in ("group", "tensor_group") and group < 1:
        raise CheckpointError(f"{place}: group_size is {group}; accepted: at least 1")
    block = settings.block("block_structure") or (128, 128)
    symmetric = content.get("symmetric") is not False
    return Scheme(kind, bits, strategy, group, block, symmetric)


class CompressedTensors(Family):
    """The format compressed-tensors.

    content: the configuration. place: where it stands, for errors.
    Raises CheckpointError or UnsupportedModel.
    """

    endings = dict.fromkeys((PACKED, SCALE, ZERO, SHAPE, COLUMNS, GLOBAL), ".weight") | dict.fromkeys(
        (
            ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point",
            ".q_scale", ".k_scale", ".v_scale", ".q_zero_point", ".k_zero_point", ".v_zero_point",
        ),
        ".weight",
    )  # fmt: skip
    unused = tuple(endings)[6:]

    def __init__(self, content: Mapping[str, Any], place: str) -> None:
        settings = Settings(content, place)
        groups = content.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise CheckpointError(f"{place}: config_groups is no object with groups")
        schemes: dict[Scheme, None] = {}
        rounded = []
        for name, group in groups.items():
            where = f"{place}: config_groups: {str(name)[:50]}"
            if not isinstance(group, Mapping):
                raise UnsupportedModel(f"{where} names a preset; accepted: an object with weights")
            _check_format(Settings(group, where), group.get("format") or content.get("format"))
            if group.get("weights") is not None:
                schemes[read_scheme(group["weights"], where)] = None
                rounded.append(_activations(group.get("input_activations"), where))
        if content.get("transform_config"):
            raise UnsupportedModel(f"{place}: transform_config rotates activations, which is not supported")
        sparsity = content.get("sparsity_config")
        if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
            kind = str(sparsity.get("format"))[:50]
            raise UnsupportedModel(f"{place}: sparsity_config: format is {kind!r}; accepted: 'dense'")
        settings.word("quantization_status", "compressed", ("compressed", "frozen"))
        self._schemes = tuple(schemes)
        bits = dict.fromkeys(f"{'fp' if s.kind == 'float' else 'int'}{s.bits}" for s in self._schemes)
        self.title = " ".join(("compressed-tensors", "+".join(bits)))
        self.wide_activations = not all(rounded)
        notes = []
        if "static" in rounded:
            notes.append(
                "scales of activations that were measured before are not used: each row gets its own"
            )
        if content.get("kv_cache_scheme"):
            notes.append("kv_cache_scheme is not used: keys and values stay in the model's type")
        self.notes = tuple(notes)

    def weight(self, name: str, parts: Mapping[str, Part], read: Read) -> Weight:
        if PACKED in parts and ITSELF in parts:
            raise Fault(name, "is there twice: plain, and as weight_packed")
        if PACKED in parts:
            packed = parts[PACKED]
            return self._fp4(name, parts) if packed.entry.dtype == "U8" else self._packed(name, parts, read)
        whole = required(parts, ITSELF, name)
        scale = required(parts, SCALE, name)
        if whole.entry.dtype == "F8_E4M3":
            return self._fp8(whole, scale, parts)
        shape = matrix_shape(checked(whole, ("I8", "F8_E4M3")))
        return self._even(name, shape, parts, None, read)

    def _packed(self, name: str, parts: Mapping[str, Part], read: Read) -> Weight:
        """Build a weight of codes in int32 words. Its shape is stored, because rows may end within a word."""
        n, words = matrix_shape(checked(parts[PACKED], ("I32",)))
        where = checked(required(parts, SHAPE, name), ("I64", "I32"), (2,))
        shape = tuple(small(where, read).tolist())
        if shape[0] != n or shape[1] < 1:
            text = f"says {list(shape)}; accepted: {n} rows, as {PACKED[1:]} has, and at least one column"
            raise Fault(where.name, text)
        return self._even(name, (shape[0], shape[1]), parts, words, read)

    def _even(
        self, name: str, shape: tuple[int, int], parts: Mapping[str, Part], words: int | None, read: Read
    ) -> Weight:
        """Build a weight of whole numbers. words: int32 words of a row; None: it has a byte for each code."""
        n, k = shape
        scale = checked(required(parts, SCALE, name), PLAIN_TYPES)
        zero = parts.get(ZERO)
        scheme = self._scheme(
            parts[ITSELF if words is None else PACKED], scale, shape, zero is not None, words
        )
        groups, bits = scheme.groups(k), scheme.bits
        checked(scale, PLAIN_TYPES, *_scale_shapes(scheme, n, k))
        if zero is not None and zero.entry.dtype == "I32":
            checked(zero, ("I32",), (-(-n * bits // 32), groups))
        elif zero is not None:
            checked(zero, ("I8", "U8"), *_scale_shapes(scheme, n, k))
        group = scheme.group if scheme.strategy == "group" else k
        columns = group_columns(parts.get(COLUMNS), k, group, groups, read)

        def levels(read: Read) -> Levels:
            scales = scale_values(scale, read).view(-1, groups).expand(n, groups)
            if words is None:
                codes = _offset(read(parts[ITSELF]), bits, name)
            else:
                codes = unpack(read(parts[PACKED]), bits)[:, :k]
            offsets = 1 << (bits - 1) if zero is None else _zeros(read(zero), n, groups, bits, name)
            return Levels(codes, scales.contiguous(), offsets)

        return EvenWeight(shape, tuple(parts.values()), bits, group, levels, columns)

    def _scheme(
        self, part: Part, scale: Part, shape: tuple[int, int], zeros: bool, words: int | None
    ) -> Scheme:
        """Return the scheme of the configuration that a weight of whole numbers has. Raises Fault."""
        n, k = shape
        for scheme in self._schemes:
            fits = words is None or -(-k * scheme.bits // 32) == words
            fits = fits and scheme.kind == "int" and (zeros or scheme.symmetric)
            if fits and scale.shape in _scale_shapes(scheme, n, k):
                return scheme
        found = f"scales {str(list(scale.shape))[:100]} and {'zero points' if zeros else 'no zero points'}"
        text = f"{str(list(part.shape))[:100]} for {n} x {k} values has {found}; {self._accepted()}"
        raise Fault(part.name, text)

    def _fp8(self, whole: Part, scale: Part, parts: Mapping[str, Part]) -> Weight:
        """Build a weight of 8-bit floats."""
        shape = checked(whole, ("F8_E4M3",)).shape
        if len(shape) not in (2, 3) or 0 in shape:
            raise Fault(whole.name, f"has shape {str(list(shape))[:100]}; accepted: two or three axes")
        k = shape[-1]
        faults = []
        for scheme in self._schemes:
            if scheme.kind != "float" or scheme.bits != 8:
                continue
            block = {"block": scheme.block, "group": (1, scheme.group)}.get(scheme.strategy)
            try:
                block, scales = grid_scales(scale, shape, block, (*PLAIN_TYPES, "U8", "F8_E8M0"))
            except Fault as fault:
                faults.append(fault)
                continue
            return GridWeight(
                shape, tuple(parts.values()), block, lambda read: read(whole).view(-1, k), scales
            )
        if faults:
            raise faults[0]
        raise Fault(whole.name, f"has floats of 8 bits; {self._accepted()}")

    def _fp4(self, name: str, parts: Mapping[str, Part]) -> Weight:
        """Build a weight of 4-bit floats: MXFP4, or NVFP4 with a scale of the tensor that divides."""
        packed = checked(parts[PACKED], ("U8",))
        n, pairs = matrix_shape(packed)
        scale = required(parts, SCALE, name)
        shape = (n, 2 * pairs)
        schemes = [scheme for scheme in self._schemes if scheme.kind == "float" and scheme.bits == 4]
        if not schemes or ZERO in parts:
            raise Fault(packed.name, f"has floats of 4 bits; {self._accepted()}")
        whole = parts.get(GLOBAL)
        if whole is not None:
            checked(whole, PLAIN_TYPES, (1,), ())
        types = (*PLAIN_TYPES, "F8_E4M3", "U8", "F8_E8M0")
        block, scales = grid_scales(scale, shape, (1, schemes[0].group or 16), types)

        def divided(read: Read) -> Tensor:
            return scales(read) if whole is None else scales(read) / scale_values(whole, read)

        return GridWeight(shape, tuple(parts.values()), block, lambda read: read(packed), divided)

    def _accepted(self) -> str:
        named = "; ".join(map(str, self._schemes[:4])) or "nothing"
        more = f", and {len(self._schemes) - 4} more" if len(self._schemes) > 4 else ""
        return f"accepted by config_groups: {named}{more}"


def _check_format(settings: Settings, name: Any) -> None:
    """Raise UnsupportedModel for a format that is not read."""
    if name not in FORMATS:
        raise UnsupportedModel(
            f"{settings.place}: format is {str(name)[:50]!r}; accepted: {', '.join(FORMATS)}"
        )


def _activations(content: Any, place: str) -> str:
    """Say how activations are rounded to 8 bits: "dynamic", "static", or "" if they are not."""
    if content is None:
        return ""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{place}: input_activations is {str(content)[:50]!r}; accepted: an object")
    if content.get("num_bits", 8) != 8:
        return ""
    return "dynamic" if content.get("dynamic") else "static"


def _scale_shapes(scheme: Scheme, n: int, k: int) -> tuple[Shape, ...]:
    """Return the shapes that the scales of a weight may have."""
    if scheme.strategy == "tensor":
        return ((), (1,), (1, 1))
    if scheme.strategy == "channel":
        return ((n, 1), (n,))
    return ((n, scheme.groups(k)),) if scheme.strategy == "group" else ()


def _offset(codes: Tensor, bits: int, name: str) -> Tensor:
    """Turn signed codes (int8) into unsigned ones, in place. Raises CheckpointError for larger codes."""
    half = 1 << (bits - 1)
    if bits < 8 and codes.numel() and not -half <= int(codes.min()) <= int(codes.max()) < half:
        raise CheckpointError(f"{name[:300]} has codes beyond {bits} bits")
    return codes.view(torch.uint8).add_(half)


def _zeros(stored: Tensor, n: int, groups: int, bits: int, name: str) -> Tensor:
    """Return zero points as unsigned codes, (n, groups). They are packed along the rows, or plain int8."""
    if stored.dtype is torch.int32:
        return unpack(stored.t(), bits)[:, :n].t().contiguous()
    return _offset(stored.view(-1, groups), bits, name).expand(n, groups).contiguous()
