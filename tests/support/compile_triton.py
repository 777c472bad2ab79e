"""Compile Triton's kernels for a Hopper GPU, exactly as launches there compile them. This needs no GPU.

    python -m tests.support.compile_triton      # without TRITON_INTERPRET: interpreted kernels never compile

The functions that launch kernels run here with tensors in the shapes of models. A stand-in for the driver
names a Hopper GPU, and each launch ends after compiling. So Triton derives types, constants and hints from
the arguments as on a GPU: an address or size that 16 divides is marked so, and a size of 1 becomes a
constant. It prints JSON, one entry for each launch: the kernel; the type of its numbers; the
arguments that 16 divides ("hints"); the arguments that are constants because they are 1 ("ones"); bytes of
shared memory; and how many of the kernel's reads and writes take 16 bytes at once.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from fovea.kernels.attention import Chunk, Decodes, Heads, Pieces, PrefixGroups
from fovea.kernels.float8 import FP8
from fovea.kernels.pages import FORMATS, KVPool
from fovea.kernels.quantize import INT4, INT8
from fovea.kernels.triton import decode as triton_decode
from fovea.kernels.triton import experts as triton_experts
from fovea.kernels.triton import products as triton_products
from fovea.kernels.triton import quantized
from fovea.kernels.triton import rows as triton_rows
from fovea.kernels.triton import states as triton_states
from fovea.kernels.triton.kernels import TritonKernels
from tests.support.codes import SCHEMES
from tests.support.states import mix, plan_of

SHAPES = (
    ((28, 4, 128), torch.bfloat16),
    ((28, 4, 128), torch.float32),
    ((8, 4, 256), torch.bfloat16),
    ((16, 2, 512), torch.bfloat16),
    ((16, 2, 512), torch.float32),
    ((6, 1, 72), torch.bfloat16),
)
"""Query heads, KV heads, size of a head, and type of numbers.

They are those of a 7 B model, of two with wide heads (Gemma 3 and 4), and of one with a size that 16 does not
divide.
"""
ROWS, SIZE, BLOCKS, TABLE, PROCESSORS = 8, 16, 64, 32, 132
LONGEST = TABLE * SIZE


class HopperDriver:
    """The part of Triton's driver that a launch asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launch_all(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Call every function that launches a kernel, as decoder layers do.

    Attention runs for one row alone, and for eight rows that share a prefix.
    """
    heads, kv_heads, dim = shape
    width = heads * dim
    x, weight = torch.empty(ROWS, width, dtype=dtype), torch.empty(width, dtype=dtype)
    triton_rows.rms_norm(x, weight, 1e-6)
    triton_rows.add_norm(x, x, None, weight, 1e-6)
    triton_rows.add_norm(x, x, weight, weight, 1e-6, centered=True)
    triton_rows.add_norm(x, x, weight, None, 1e-6, factor=weight[:1])
    gated = torch.empty(ROWS, 8 * width, dtype=dtype)
    for activation in ("silu", "gelu", "gelu_pytorch_tanh", "relu", "quick_gelu"):
        triton_rows.gate(gated, activation)
    kv = torch.empty(BLOCKS, SIZE, 2, kv_heads, dim, dtype=dtype)
    qkv = torch.empty(ROWS, heads + 2 * kv_heads, dim, dtype=dtype)
    angle, slots = torch.empty(ROWS, 1, dim), torch.zeros(ROWS, dtype=torch.long)
    norms = torch.empty(dim, dtype=dtype), torch.empty(dim, dtype=dtype)
    triton_rows.rotate_store(qkv, heads, angle, angle, None, 1e-6, kv, slots)
    half = torch.empty(ROWS, 1, dim // 2)
    triton_rows.rotate_store(qkv, heads, half, half, norms, 1e-6, kv, slots, centered=True)
    triton_rows.rotate_store(qkv[:, :heads], heads, angle, angle, norms, 1e-6, None, None)
    keys = qkv[:, : heads + kv_heads]
    triton_rows.rotate_store(keys, heads, angle, angle, norms, 1e-6, kv, slots, value_norm=norms[0])
    query = triton_rows.rotate_store(qkv, heads, angle, angle, norms, 1e-6, kv, slots)
    pages = [
        kv,
        *(KVPool((1, BLOCKS, SIZE), kv_heads, dim, dtype, format).kv[0] for format in FORMATS.values()),
    ]
    for each in pages[1:]:
        triton_rows.rotate_store(qkv, heads, angle, angle, norms, 1e-6, each, slots)
    members = torch.zeros(1, triton_decode.shared_rows(heads // kv_heads), dtype=torch.long)
    for rows, shares in ((1, None), (ROWS, PrefixGroups(slots, members, slots[:1]))):
        tables = torch.zeros(rows, TABLE, dtype=torch.long)
        rule = triton_decode.cutting(Heads(heads, kv_heads, dim), PROCESSORS)
        groups = 0 if shares is None else 1
        arrays = {
            name: torch.zeros(shape, dtype=torch.long)
            for name, shape in rule.shapes(rows, LONGEST, groups, 4).items()
        }
        pieces = Pieces.of(arrays, rule, rule.room(rows, LONGEST, shared=groups > 0))
        decodes = Decodes(0, tables, slots[:rows], LONGEST, None, shares, None, pieces)
        out = torch.empty_like(query[:rows])
        for each in pages:
            triton_decode.decode(query[:rows], each, decodes, dim**-0.5, PROCESSORS, out)
    for each in pages:
        chunks = (
            Chunk(0, ROWS, 0, tables[0]),
            Chunk(0, ROWS, 0, tables[0], torch.zeros(ROWS, 2, dtype=torch.long)),
        )
        triton_decode.prefill(query, each, chunks, dim**-0.5, torch.empty_like(query))
    launch_products(width, dtype)
    launch_states(dim, dtype)
    launch_experts(dtype)


def launch_experts(dtype: torch.dtype) -> None:
    """Choose experts, add their results, and open gates of rows."""
    for experts, active, factors in ((128, 8, None), (60, 6, torch.empty(60, dtype=dtype))):
        logits, x = torch.empty(2, experts, dtype=dtype), torch.empty(2, 2048, dtype=dtype)
        opening = None if factors is not None else (x, x[:1])
        weights, _, opened = triton_experts.choose_experts(
            logits, active, normalized=factors is not None, factors=factors, opening=opening
        )
        triton_experts.sum_experts(torch.empty(2, active, 2048, dtype=dtype), weights, x, opened, x)
    triton_rows.open_gate(x, x)


def launch_states(dim: int, dtype: torch.dtype) -> None:
    """Compute one token of each sequence in layers with a state."""
    shape, weight = (2, dim, 4, dim), torch.empty(4, 4 * dim, dtype=dtype)
    mix(TritonKernels(torch.device("cpu")), shape, plan_of([(1, 1), (2, 3)], torch.device("cpu")), 2, dtype,
        torch.device("cpu"))  # fmt: skip
    x, state = weight[:1], torch.empty(8, 3, 4 * dim, dtype=dtype)
    (wave,) = plan_of([(1, 1)], torch.device("cpu")).waves
    assert wave.decodes is not None
    triton_states.conv(x, weight, None, None, state, wave.decodes, torch.empty_like(x))


def launch_products(width: int, dtype: torch.dtype) -> None:
    """Multiply rows by weights in every format, one at a time and by expert, with splits of k and without."""
    weights = torch.zeros(3, 128, width, dtype=dtype)
    x, bias = torch.empty(192, width, dtype=dtype), torch.empty(128, dtype=dtype)
    counts = torch.zeros(3, dtype=torch.int32)
    for format in (INT8, INT4, FP8, None):
        packed = triton_products.pack(weights, format)
        for rows in (8, 192):
            triton_products.multiply(x[:rows], packed, None, None, counts, PROCESSORS)
        chosen = torch.zeros(4, 2, dtype=torch.long)
        for activation in (None, "silu"):
            triton_products.multiply_chosen(x[:4], packed, chosen, activation)
    for format in (INT8, INT4):
        packed = triton_products.pack(weights[:1], format)
        for rows in (1, 32, 64):
            residual = torch.empty(rows, 128, dtype=dtype)
            triton_products.multiply(x[:rows], packed, bias, residual, None, PROCESSORS)
        triton_products.unpack(packed, 0, 128, dtype)
    triton_products.round_input(x)


def launch_codes(dtype: torch.dtype) -> None:
    """Multiply by codes of quantized checkpoints: all kinds of scales and offsets, and several schemes."""
    for scheme in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "AWQ", "one scale per output"):
        product = quantized.coded_product([SCHEMES[scheme](128, 1280)], None, None, False, PROCESSORS)
        assert product is not None
        for rows in (1, 64):
            product(torch.empty(rows, 1280, dtype=dtype), None)
        triton_products.unpack(product.weights[0], 0, 128, dtype)


def main() -> None:
    do_compile, run = JITFunction._do_compile, JITFunction.run
    launches: list[dict[str, Any]] = []

    def compile_and_note(
        kernel: JITFunction[Any], key: Any, signature: dict[str, str], device: int, constants: dict[Any, Any],
        options: Any, hints: dict[tuple[int, ...], Any], warmup: bool,
    ) -> Any:  # fmt: skip
        binary = do_compile(kernel, key, signature, device, constants, options, hints, warmup)
        code = binary.asm["ptx"]
        params = {param.name: param for param in kernel.params}
        launches.append(
            {
                "kernel": kernel.__name__.rpartition(".")[2],
                "type": next(iter(signature.values())),
                "hints": [kernel.arg_names[at] for (at,), hint in hints.items() if hint],
                "ones": [
                    name
                    for name, kind in signature.items()
                    if kind == "constexpr" and not params[name].is_constexpr
                ],
                "shared_bytes": binary.metadata.shared,
                "wide": sum(line.count("global.") for line in code.splitlines() if ".v4.b32" in line),
            }
        )
        assert binary.asm["cubin"]
        return binary

    def launch_nothing(kernel: JITFunction[Any], *args: Any, **kwargs: Any) -> Any:
        return run(kernel, *args, **{**kwargs, "warmup": True})

    triton.runtime.driver.set_active(HopperDriver())
    with (
        mock.patch.object(JITFunction, "_do_compile", compile_and_note),
        mock.patch.object(JITFunction, "run", launch_nothing),
    ):
        for shape, dtype in SHAPES:
            launch_all(shape, dtype)
        launch_codes(torch.bfloat16)
    print(json.dumps(launches))


if __name__ == "__main__":
    main()
