"""Measure products with one weight in every format: Fovea's bf16, int8 and int4 beside torch's.

    python benchmarks/kernels.py [--threads 2] [--repeats 7] [--outputs 9728] [--inputs 896]

The weight is copied until the copies fill 160 MB, so that each call reads another copy from memory, as the
layers of a decoder do. All kernels take turns, so that other processes on the machine disturb all of them
alike. The rows for torch's qlinear are quantized before the measurement; Fovea's kernels quantize them during
it. torch's int4 has groups of 64, as Fovea's has. Each figure is the quickest of the repeats. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.kernels.native.build import library
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.quantize import INT4, INT8, quantize
from fovea.kernels.torch.kernels import TorchKernels

ROWS = (1, 2, 4, 8, 12, 32, 64, 288, 576)
FILL = 160e6
Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Kernel:
    """A kernel that is measured.

    name: title of its column.
    make: create a product with a new copy of the weight.
    nbytes: bytes of the weight that one call reads.
    """

    name: str
    make: Callable[[], Call]
    nbytes: float


def kernels(weight: Tensor) -> list[Kernel]:
    count = weight.numel()
    cpp = library()
    if cpp is None:
        raise SystemExit("this machine cannot run the C++ kernels")
    native, onednn = NativeKernels(cpp), TorchKernels(pack=True)

    def ours(product: Callable[[Tensor, None], Tensor] | None) -> Call:
        assert product is not None
        return lambda x: product(x, None)

    return [
        Kernel("fovea bf16", lambda: ours(native.product(weight, None, None, False)), 1.5 * count),
        Kernel(
            "fovea int8",
            lambda: ours(native.quantized_product(weight, None, None, False, INT8)),
            count * (1 + 2 / 128),
        ),
        Kernel(
            "fovea int4",
            lambda: ours(native.quantized_product(weight, None, None, False, INT4)),
            count * (0.5 + 2 / 64),
        ),
        Kernel("torch bf16 (oneDNN)", lambda: ours(onednn.product(weight, None, None, False)), 2.0 * count),
        Kernel("torch int8 (qlinear)", lambda: torch_int8(weight), count),
        Kernel("torch int4 (int4pack)", lambda: torch_int4(weight), count * (0.5 + 4 / 64)),
    ]


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


def torch_int4(weight: Tensor) -> Call:
    levels = quantize(weight, INT4)
    codes = (levels.values.flatten(1)[:, : weight.shape[1]].int() // 16 + 8).clamp(0, 15).to(torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scale = levels.scale.T.contiguous().to(torch.bfloat16)
    both = torch.stack((scale, torch.zeros_like(scale)), dim=-1).contiguous()
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
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    n, k = args.outputs, args.inputs
    weight = (torch.randn(n, k) * 0.02).to(torch.bfloat16)
    measured = kernels(weight)
    calls = {
        kernel.name: [kernel.make() for _ in range(int(FILL / kernel.nbytes) + 1)] for kernel in measured
    }
    print(
        f"{n} outputs, {k} inputs, {args.threads} threads; GB/s of the packed bytes, GFLOP/s; "
        f"best of {args.repeats}"
    )
    print(f"{'rows':>5} " + "".join(f"{kernel.name:>24}" for kernel in measured))
    results: dict[str, dict[int, float]] = {kernel.name: {} for kernel in measured}
    for rows in ROWS:
        x = torch.randn(rows, k).to(torch.bfloat16)
        samples: dict[str, list[float]] = {kernel.name: [] for kernel in measured}
        for repeat in range(args.repeats + 1):
            for kernel in measured:
                # With many rows arithmetic is the bound, not memory, so two copies are enough.
                duration = seconds(calls[kernel.name][: 2 if rows > 12 else None], x)
                if repeat:
                    samples[kernel.name].append(duration)
        line = f"{rows:5} "
        for kernel in measured:
            best = results[kernel.name][rows] = min(samples[kernel.name])
            line += f"{kernel.nbytes / best / 1e9:11.1f} {2e-9 * rows * n * k / best:8.0f} GF "
        print(line)
    print(json.dumps({"outputs": n, "inputs": k, "threads": args.threads, "seconds": results}))


if __name__ == "__main__":
    main()
