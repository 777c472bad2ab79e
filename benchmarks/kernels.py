"""Measure products with one weight in every format: Fovea's bf16, int8 and int4 beside torch's.

    python benchmarks/kernels.py [--threads 2] [--repeats 7] [--outputs 9728] [--inputs 896] [--rows 1,288]
    FOVEA_NATIVE_KERNELS=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/kernels.py

The second form measures a machine without AVX-512 on one that has it. Before and after each number of rows,
the cores' rates in registers are measured (peak.cpp). Fovea's speed is also given as a share of the higher of
the two: that of int8 and int4 as a share of the rate of products of bytes.

The weight is copied until the copies fill 160 MB, so that each call reads another copy from memory, as the
layers of a decoder do. All kernels take turns, so that other processes on the machine disturb all of them
alike. The rows for torch's qlinear are quantized before the measurement; Fovea's kernels quantize them during
it. torch's int4 has groups of 64, as Fovea's has. Each figure is the quickest of the repeats. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.kernels.codes import Codes
from fovea.kernels.native import products
from fovea.kernels.native.build import library
from fovea.kernels.native.instruction_sets import chosen
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.quantize import INT4, INT8, quantize
from fovea.kernels.torch_kernels import TorchKernels
from peak import peaks

ROWS = (1, 2, 4, 8, 12, 32, 64, 288, 576)
FILL = 160e6
Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Kernel:
    """A kernel that is measured.

    name: title of its column.
    make: create a product with a new copy of the weight.
    nbytes: bytes of the weight that one call reads.
    peak: name of the rate of `peaks` that bounds it; empty: not Fovea's.
    """

    name: str
    make: Callable[[], Call]
    nbytes: float
    peak: str = ""


def kernels(weight: Tensor) -> list[Kernel]:
    count = weight.numel()
    cpp = library()
    if cpp is None:
        raise SystemExit("this machine cannot run the C++ kernels")
    native, onednn = NativeKernels(cpp), TorchKernels(pack=True)

    def ours(product: Callable[[Tensor, None], Tensor] | None) -> Call:
        assert product is not None
        return lambda x: product(x, None)

    found = [
        Kernel("fovea bf16", lambda: ours(native.product(weight, None, None, False)), 1.5 * count, "float"),
        Kernel(
            "fovea int8",
            lambda: ours(native.quantized_product(weight, None, None, False, INT8)),
            count * (1 + 2 / 128),
            "int8",
        ),
        Kernel(
            "fovea int4",
            lambda: ours(native.quantized_product(weight, None, None, False, INT4)),
            count * (0.5 + 4 / 32),
            "int8",
        ),
        Kernel("fovea bf16, not packed", lambda: ours(unpacked(native, weight)), 2.0 * count, "float"),
        Kernel("torch float32 (oneDNN)", lambda: wide(onednn, weight), 4.0 * count),
        Kernel("torch int4 (int4pack)", lambda: torch_int4(weight), count * (0.5 + 4 / 32)),
    ]
    if onednn.product(weight, None, None, False) is not None:
        packed = Kernel(
            "torch bf16 (oneDNN)", lambda: ours(onednn.product(weight, None, None, False)), 2.0 * count
        )
        # Without VNNI, qlinear takes minutes for a product.
        return [*found, packed, Kernel("torch int8 (qlinear)", lambda: torch_int8(weight), count)]
    return found


def unpacked(native: NativeKernels, weight: Tensor) -> Callable[[Tensor, None], Tensor] | None:
    """Return a product whose weight has 16 bits per value, as one with unusual values has."""
    before, products.MAX_EXCEPTIONS = products.MAX_EXCEPTIONS, -1.0
    try:
        return native.product(weight, None, None, False)
    finally:
        products.MAX_EXCEPTIONS = before


def wide(onednn: TorchKernels, weight: Tensor) -> Call:
    product = onednn.product(weight.float(), None, None, False)
    assert product is not None
    return lambda x: product(x.float(), None)


def torch_int8(weight: Tensor) -> Call:
    scale = weight.float().abs().amax(1) / 127
    levels = (weight.float() / scale[:, None]).round().to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(levels, None)
    zeros = torch.zeros(len(weight), dtype=torch.int8)
    quantized: dict[int, Tensor] = {}

    def call(x: Tensor) -> Tensor:
        if len(x) not in quantized:
            quantized[len(x)] = ((x.float() * 30).round().clamp(-127, 127) + 128).to(torch.uint8)
        rows = quantized[len(x)]
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            rows, 1 / 30, 128, packed, scale, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
        )
        return out

    return call


@functools.cache  # quantizing takes seconds, and all copies have the same weight
def int4_codes(weight: Tensor) -> Codes:
    return quantize(weight, INT4)


def torch_int4(weight: Tensor) -> Call:
    codes = int4_codes(weight)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.codes.int(), 1)
    scale, minimum = codes.full_scales()
    assert minimum is not None
    # torch's values are scale * (code - 8) + zero.
    pair = scale.T.contiguous(), (minimum + 8 * scale).T.contiguous()
    both = torch.stack(pair, dim=-1).to(torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, INT4.group, both)


def seconds(calls: list[Call], x: Tensor) -> float:
    started = time.perf_counter()
    for call in calls:
        call(x)
    return (time.perf_counter() - started) / len(calls)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--outputs", type=int, default=9728)
    parser.add_argument("--inputs", type=int, default=896)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows, by commas")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    n, k = args.outputs, args.inputs
    weight = (torch.randn(n, k) * 0.02).to(torch.bfloat16)
    measured = kernels(weight)
    calls = {
        kernel.name: [kernel.make() for _ in range(int(FILL / kernel.nbytes) + 1)] for kernel in measured
    }
    instructions = chosen()
    assert instructions is not None
    print(
        f"{instructions.name}; {n} outputs, {k} inputs, {args.threads} threads; GB/s of the packed bytes, "
        f"GFLOP/s; best of {args.repeats}"
    )
    print(f"{'rows':>5} " + "".join(f"{kernel.name:>24}" for kernel in measured))
    results: dict[str, dict[int, float]] = {kernel.name: {} for kernel in measured}
    shares: dict[str, dict[int, float]] = {kernel.name: {} for kernel in measured if kernel.peak}
    for rows in map(int, args.rows.split(",")):
        limit = peaks(instructions, args.threads)
        x = torch.randn(rows, k).to(torch.bfloat16)
        samples: dict[str, list[float]] = {kernel.name: [] for kernel in measured}
        for repeat in range(args.repeats + 1):
            for kernel in measured:
                # With many rows arithmetic is the bound, not memory, so two copies are enough.
                duration = seconds(calls[kernel.name][: 2 if rows > 12 else None], x)
                if repeat:
                    samples[kernel.name].append(duration)
        after = peaks(instructions, args.threads)
        limit = {name: max(rate, after[name]) for name, rate in limit.items()}
        line = f"{rows:5} "
        for kernel in measured:
            best = results[kernel.name][rows] = min(samples[kernel.name])
            rate = 2e-9 * rows * n * k / best
            share = f"{rate / limit[kernel.peak]:4.0%}" if kernel.peak else ""
            if kernel.peak:
                shares[kernel.name][rows] = rate / limit[kernel.peak]
            line += f"{kernel.nbytes / best / 1e9:9.1f} {rate:6.0f} GF {share:5}"
        print(f"{line} of {limit['float']:.0f} and {limit['int8']:.0f} GF in registers", flush=True)
    print(
        json.dumps(
            {"instructions": instructions.name, "outputs": n, "inputs": k, "threads": args.threads,
             "seconds": results, "shares_of_peak": shares}
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
