"""Rewrites tiny checkpoints into the published formats of quantized weights, a tensor at a time.

Each maker returns the tensors that the tools of a format write, by the ending of their names, and the values
that they stand for, computed from the codes before these are packed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 16
"""Columns of a group: rows of tiny decoders have 64 and 112 values."""
BLOCK = (32, 48)
"""Rows and columns of a block; rows of 64 and 112 values end within one."""
LAYERS = re.compile(r"(self_attn|attention|mlp|feed_forward|experts)\.(\w+\.)*(?!gate\.)\w+\.weight$")
"""Names of the weights that are quantized: maps of the decoder's layers."""
Tensors = dict[str, Tensor]
Made = tuple[Tensors, Tensor]
"""Tensors by ending, such as ".qweight", and the values, float32."""


@dataclass(frozen=True)
class Scheme:
    """A format of quantized weights.

    config: the checkpoint's quantization_config.
    make: quantizes one weight (n, k).
    kept: whether codes can be kept.
    title: what `StoredWeights.quantization` says.
    """

    config: Mapping[str, Any]
    make: Callable[[Tensor], Made]
    kept: bool
    title: str


def quantize_folder(plain: Path, folder: Path, scheme: Scheme, *, layers: re.Pattern[str] = LAYERS) -> Path:
    """Write a quantized copy of a checkpoint to `folder`, and replace the weights of `plain` by its values.

    layers: names of the tensors to quantize.
    """
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    tensors, stored, values = load_file(plain / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and layers.search(name) and "visual" not in name and "vision" not in name:
            made, values[name] = scheme.make(tensor.float())
            stored |= {name.removesuffix(".weight") + ending: part for ending, part in made.items()}
        else:
            stored[name] = values[name] = tensor
    assert len(stored) > len(tensors), "nothing was quantized"
    save_file({name: part.contiguous() for name, part in stored.items()}, folder / "model.safetensors")
    save_file(values, plain / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(scheme.config)}))
    return folder


def pack(codes: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Pack codes (rows, columns) into int32 words, lowest bits first.

    order: the column in each run of columns that goes to each place of a word; (): in order.
    """
    per = 32 // bits
    rows, columns = codes.shape
    padded = torch.zeros(rows, -(-columns // per) * per, dtype=torch.int64)
    padded[:, :columns] = codes
    words = torch.zeros(rows, padded.shape[1] // per, dtype=torch.int64)
    for place in range(per):
        words |= padded[:, (order[place] if order else place) :: per] << bits * place
    return (words & 0xFFFFFFFF).view(torch.int32)[:, ::2].contiguous()


def even(
    weight: Tensor, bits: int, groups: Tensor, *, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round a weight to evenly spaced levels.

    groups: (k,) the group of each column.
    Returns codes (n, k), scales (n, groups) in `dtype`, zero points (n, groups), and the values.
    """
    count, top = int(groups.max()) + 1, (1 << bits) - 1
    low = torch.stack([weight[:, groups == g].amin(1) for g in range(count)], 1).clamp(max=0)
    high = torch.stack([weight[:, groups == g].amax(1) for g in range(count)], 1).clamp(min=0)
    if symmetric:
        scale = (torch.maximum(-low, high) / (top / 2)).to(dtype)
        zero = torch.full(scale.shape, 1 << (bits - 1))
    else:
        scale = ((high - low) / top).to(dtype)
        zero = (-low / scale.float()).round().clamp(0, top).long()
    wide, zeros = scale.float()[:, groups], zero[:, groups]
    codes = ((weight / wide).round() + zeros).clamp(0, top).long()
    return codes, scale, zero, (codes - zeros).float() * wide


def columns(k: int, group: int) -> Tensor:
    return torch.arange(k) // group


def shuffled(k: int, group: int) -> Tensor:
    """Groups of columns as act-order leaves them: each has `group` columns, anywhere in the row."""
    return columns(k, group)[torch.randperm(k, generator=torch.Generator().manual_seed(k))]


def compressed(weights: Mapping[str, Any], format: str, activations: Mapping[str, Any] | None = None) -> Any:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": format}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*visual.*"], "kv_cache_scheme": None,
    }  # fmt: skip


def integers(bits: int, strategy: str, *, symmetric: bool = True) -> dict[str, Any]:
    group = GROUP if strategy == "group" else None
    return {
        "num_bits": bits, "type": "int", "strategy": strategy, "group_size": group, "symmetric": symmetric,
        "dynamic": False,
    }  # fmt: skip


def floats(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, **more}


DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True, "dynamic": False}


def packed(bits: int, strategy: str, *, symmetric: bool = True, act_order: bool = False) -> Scheme:
    """compressed-tensors: codes in int32 words."""

    def make(weight: Tensor) -> Made:
        n, k = weight.shape
        group = GROUP if strategy == "group" else k
        index = shuffled(k, group) if act_order else columns(k, group)
        codes, scale, zero, values = even(weight, bits, index, symmetric=symmetric, dtype=torch.bfloat16)
        tensors = {
            ".weight_packed": pack(codes, bits), ".weight_scale": scale, ".weight_shape": torch.tensor([n, k])
        }  # fmt: skip
        if not symmetric:
            tensors[".weight_zero_point"] = pack(zero.t(), bits).t()
        if act_order:
            tensors[".weight_g_idx"] = index.int()
        return tensors, values

    config = compressed(integers(bits, strategy, symmetric=symmetric), "pack-quantized")
    return Scheme(config, make, not act_order, f"compressed-tensors int{bits}")


def bytes_of(strategy: str, activations: Mapping[str, Any], *, symmetric: bool = True) -> Scheme:
    """compressed-tensors: a byte for each code of 8 bits."""

    def make(weight: Tensor) -> Made:
        index = columns(weight.shape[1], weight.shape[1])
        codes, scale, zero, values = even(weight, 8, index, symmetric=symmetric, dtype=torch.float32)
        tensors = {".weight": (codes - 128).to(torch.int8), ".weight_scale": scale}
        if not symmetric:
            tensors[".weight_zero_point"] = (zero - 128).to(torch.int8)
        if not activations["dynamic"]:
            tensors[".input_scale"] = torch.tensor([0.5])
        return tensors, values

    config = compressed(integers(8, strategy, symmetric=symmetric), "int-quantized", activations)
    return Scheme(config, make, True, "compressed-tensors int8")


def blocks(tensor: Tensor, block: tuple[int, int]) -> Tensor:
    """Spread numbers of blocks to the values of the blocks."""
    return tensor.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)


def peaks(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude in each block of a weight."""
    n, k = weight.shape
    rows, wide = -(-n // block[0]), -(-k // block[1])
    padded = torch.zeros(rows * block[0], wide * block[1])
    padded[:n, :k] = weight.abs()
    return padded.view(rows, block[0], wide, block[1]).amax((1, 3))


def eight_bits(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    wide = blocks(scale.float(), block)[: weight.shape[0], : weight.shape[1]]
    stored = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored, stored.float() * wide


def fp8(config: Any, per: str, name: str, title: str, *, static: bool = False) -> Scheme:
    """Floats of 8 bits with a scale per tensor, row or block. name: ending of the scales' names."""

    def make(weight: Tensor) -> Made:
        n, k = weight.shape
        block = {"tensor": (n, k), "row": (1, k), "block": BLOCK}[per]
        scale = (peaks(weight, block) / 448).to(torch.float32 if per == "block" else torch.bfloat16)
        stored, values = eight_bits(weight, scale, block)
        scale = scale.view(-1)[0] if per == "tensor" else scale
        tensors = {".weight": stored, name: scale}
        return tensors | ({".input_scale": torch.tensor(0.1)} if static else {}), values

    return Scheme(config, make, False, title)


def exponents(weight: Tensor, top: float) -> Tensor:
    """Scales of groups of 32 columns as powers of 2 (E8M0): uint8 with a bias of 127."""
    return ((peaks(weight, (1, 32)) / top).log2().ceil() + 127).to(torch.uint8)


def mxfp8() -> Scheme:
    def make(weight: Tensor) -> Made:
        scale = exponents(weight, 448)
        stored, values = eight_bits(weight, 2.0 ** (scale.float() - 127), (1, 32))
        return {".weight": stored, ".weight_scale": scale}, values

    weights = floats(8, "group", group_size=32, scale_dtype="torch.uint8")
    return Scheme(compressed(weights, "mxfp8-quantized"), make, False, "compressed-tensors fp8")


def fp4(*, nvidia: bool) -> Scheme:
    """compressed-tensors: floats of 4 bits. nvidia: NVFP4, otherwise MXFP4."""
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    group = 16 if nvidia else 32

    def make(weight: Tensor) -> Made:
        whole = torch.tensor([448 * 6 / float(weight.abs().max())])
        scale = (
            (peaks(weight, (1, 16)) / 6 * whole).to(torch.float8_e4m3fn) if nvidia else exponents(weight, 6)
        )
        full = scale.float() / whole if nvidia else 2.0 ** (scale.float() - 127)
        wide = blocks(full, (1, group))[:, : weight.shape[1]]
        codes = ((weight / wide)[..., None] - levels).abs().argmin(-1)
        tensors = {".weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
        tensors |= {".weight_scale": scale} | ({".weight_global_scale": whole} if nvidia else {})
        return tensors, levels[codes] * wide

    weights = floats(4, "tensor_group" if nvidia else "group", group_size=group)
    config = compressed(weights, "nvfp4-pack-quantized" if nvidia else "mxfp4-pack-quantized")
    return Scheme(config, make, False, "compressed-tensors fp4")


def awq(group: int = GROUP) -> Scheme:
    def make(weight: Tensor) -> Made:
        index = columns(weight.shape[1], weight.shape[1] if group == -1 else group)
        codes, scale, zero, values = even(weight, 4, index, symmetric=False, dtype=torch.float16)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        words = {".qweight": pack(codes.t(), 4, order), ".qzeros": pack(zero.t(), 4, order)}
        return {**words, ".scales": scale.t()}, values

    config = {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["visual"],
    }  # fmt: skip
    return Scheme(config, make, True, "awq")


def gptq(
    bits: int = 4,
    *,
    group: int = GROUP,
    symmetric: bool = True,
    second: bool = False,
    act_order: bool = False,
) -> Scheme:
    """GPTQ. second: version 2, whose zero points are stored as they are."""

    def make(weight: Tensor) -> Made:
        k = weight.shape[1]
        size = k if group == -1 else group
        index = shuffled(k, size) if act_order else columns(k, size)
        codes, scale, zero, values = even(weight, bits, index, symmetric=symmetric, dtype=torch.float16)
        zeros = zero if second else (zero - 1) & ((1 << bits) - 1)
        return {
            ".qweight": pack(codes, bits).t(), ".qzeros": pack(zeros.t(), bits), ".scales": scale.t(),
            ".g_idx": index.int(),
        }, values  # fmt: skip

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order}
    config |= {"sym": symmetric, "checkpoint_format": "gptq_v2" if second else "gptq"}
    return Scheme(config, make, not act_order, "gptq")


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
FP4 = (0, 0.0052083333, 0.66666667, 1, 0.33333333, 0.5, 0.16666667, 0.25)


def bitsandbytes(kind: str, *, nested: bool = False) -> Scheme:
    """bitsandbytes with 4 bits. kind: "nf4" or "fp4". nested: scales are quantized, too."""
    table = torch.tensor(NF4 if kind == "nf4" else (*FP4, *(-level for level in FP4)))

    def make(weight: Tensor) -> Made:
        flat = weight.reshape(-1, 64)
        absmax = flat.abs().amax(1)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": 64,
            "dtype": "bfloat16",
            "shape": weight.shape,
        }
        tensors = {".weight.quant_map": table.clone()}
        if nested:
            levels = torch.linspace(-1, 1, 256)
            offset = float(absmax.mean())
            peak = (
                torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256).abs().amax(1)
            )
            wide = peak.repeat_interleave(256)[: len(absmax)]
            codes = (((absmax - offset) / wide)[:, None] - levels).abs().argmin(1).to(torch.uint8)
            tensors |= {".weight.absmax": codes, ".weight.nested_absmax": peak}
            tensors[".weight.nested_quant_map"] = levels
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            absmax = levels[codes.long()] * wide + offset
        else:
            tensors[".weight.absmax"] = absmax
        codes = ((flat / absmax[:, None])[..., None] - table).abs().argmin(-1).flatten()
        tensors[".weight"] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
        text = json.dumps(state).encode()
        tensors[f".weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        return tensors, (table[codes].view(-1, 64) * absmax[:, None]).view(weight.shape)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    config |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    return Scheme(config, make, False, f"bitsandbytes {kind}")


def llm_int8() -> Scheme:
    def make(weight: Tensor) -> Made:
        peak = weight.abs().amax(1)
        codes = (weight * 127 / peak[:, None]).round()
        tensors = {".weight": codes.to(torch.int8), ".SCB": peak}
        return tensors | {".weight_format": torch.tensor(0, dtype=torch.uint8)}, codes * (peak / 127)[:, None]

    config = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
    return Scheme(config, make, True, "bitsandbytes int8")


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*BLOCK]}
ROWS = compressed(floats(8, "channel"), "float-quantized", floats(8, "token", dynamic=True))
WHOLE = compressed(floats(8, "tensor"), "float-quantized", floats(8, "tensor", dynamic=False))
SQUARES = compressed(
    floats(8, "block", block_structure=[*BLOCK]),
    "float-quantized",
    floats(8, "group", group_size=128, dynamic=True),
)
CT_FP8 = "compressed-tensors fp8"
SCHEMES: dict[str, Scheme] = {
    "w4a16": packed(4, "group"),
    "w4a16-asymmetric": packed(4, "group", symmetric=False),
    "w4a16-channel": packed(4, "channel"),
    "w4a16-act-order": packed(4, "group", act_order=True),
    "w8a16": packed(8, "channel"),
    "w2a16": packed(2, "group", symmetric=False),
    "w8a8": bytes_of("channel", DYNAMIC),
    "w8a8-static": bytes_of("channel", STATIC),
    "w8a8-asymmetric": bytes_of("channel", DYNAMIC, symmetric=False),
    "fp8-dynamic": fp8(ROWS, "row", ".weight_scale", CT_FP8),
    "fp8-static": fp8(WHOLE, "tensor", ".weight_scale", CT_FP8, static=True),
    "fp8-squares": fp8(SQUARES, "block", ".weight_scale", CT_FP8),
    "mxfp8": mxfp8(),
    "mxfp4": fp4(nvidia=False),
    "nvfp4": fp4(nvidia=True),
    "awq": awq(),
    "awq-rows": awq(-1),
    "gptq": gptq(),
    "gptq-rows": gptq(group=-1, symmetric=False),
    "gptq-asymmetric": gptq(symmetric=False),
    "gptq-v2": gptq(symmetric=False, second=True),
    "gptq-8": gptq(8),
    "gptq-act-order": gptq(act_order=True),
    "fp8-blocks": fp8(BLOCKS, "block", ".weight_scale_inv", "fp8 blocks"),
    "fp8-tensor": fp8({"quant_method": "fp8"}, "tensor", ".weight_scale", "fp8", static=True),
    "fbgemm": fp8({"quant_method": "fbgemm_fp8"}, "row", ".weight_scale", "fp8"),
    "nf4": bitsandbytes("nf4"),
    "nf4-nested": bitsandbytes("nf4", nested=True),
    "fp4": bitsandbytes("fp4"),
    "llm-int8": llm_int8(),
}
"""Formats by names of their own."""
