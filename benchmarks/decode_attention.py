"""Time of the attention of one decoder layer in steps that decode, on a GPU.

    PYTHONPATH=src python3 benchmarks/decode_attention.py

The heads are those of Qwen2.5-VL-7B. Each case runs as a CUDA graph of so many layers that their keys and
values do not fit into the GPU's cache, REPEATS times, and the median counts. It prints microseconds per layer
and the rate at which keys and values are read, which the GPU's memory bandwidth limits, and then one line of
JSON. Without CUDA, TRITON_INTERPRET=1 tries the script with a few short contexts, in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch

from fovea.core.sampling import SamplingParams
from fovea.engine.execute.attention_plan import GroupPlanner
from fovea.engine.layers.config import KVGroup
from fovea.engine.schedule.plan import Work
from fovea.engine.sequence import Sequence
from fovea.kernels.attention import Heads
from fovea.kernels.triton.kernels import TritonKernels

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
HEADS, BLOCK, SHORTER = Heads(28, 4, 128), 16, 1 if CUDA else 250
CACHE_BYTES = (256 << 20) // SHORTER**2
REPEATS = 20 if CUDA else 1
CASES: dict[str, tuple[list[int], int | None]] = {
    "1 row of 500": ([500], None),
    "1 row of 8,000": ([8000], None),
    "32 rows of 500": ([500] * 32, None),
    "one of 30,000 among 31 of 500": ([500] * 31 + [30_000], None),
    "64 rows of 200 to 12,800": ([200 * n for n in range(1, 65)], None),
    "256 rows of 1,000": ([1000] * 256, None),
    "64 rows of 8,000 that see 1,024": ([8000] * 64, 1024),
}
"""Lengths of contexts, and the sliding window; None: there is none."""


def microseconds(run: Callable[[], None]) -> float:
    """Return the time of one call, on the GPU as a graph."""
    if not CUDA:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    run()  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()  # type: ignore[no-untyped-call]
        graph.replay()
        end.record()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)  # type: ignore[no-untyped-call]
    return statistics.median(times)


def measure(lengths: list[int], window: int | None) -> tuple[float, float]:
    """Return microseconds per layer, and gigabytes of keys and values per second."""
    seen = sum(lengths if window is None else (min(length, window) for length in lengths))
    row_bytes = 2 * HEADS.kv * HEADS.dim * DTYPE.itemsize
    layers = -(-CACHE_BYTES // (seen * row_bytes))
    counts = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    work = []
    for number, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        seq = Sequence(f"s{number}", [0] * length, SamplingParams(), 1)
        seq.blocks, order = order[:count], order[count:]
        seq.window_blocks = seq.blocks
        work.append(Work(seq, length - 1, 1))
    kernels = TritonKernels(DEVICE)
    group = KVGroup((0,), window, HEADS)
    plan = GroupPlanner(kernels, group, False, BLOCK, DEVICE, DTYPE).plan(work)
    kv = torch.randn(layers, sum(counts), BLOCK, 2, HEADS.kv, HEADS.dim, device=DEVICE, dtype=DTYPE)
    query = torch.randn(len(lengths), HEADS.query, HEADS.dim, device=DEVICE, dtype=DTYPE)

    def run() -> None:
        for layer in kv:
            kernels.attend(query, layer, plan, HEADS.dim**-0.5)

    spent = microseconds(run) / layers
    return spent, seen * row_bytes / spent / 1e3


@torch.inference_mode()
def main() -> None:
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("torch sees no CUDA device; TRITON_INTERPRET=1 tries this script without one")
    figures: dict[str, float] = {}
    print("| contexts | us per layer | GB/s |\n|---|---|---|")
    for name, (lengths, window) in CASES.items():
        spent, rate = measure(
            [max(1, length // SHORTER) for length in (lengths if CUDA else lengths[-2:])],
            None if window is None else max(1, window // SHORTER),
        )
        figures[name] = round(spent, 1)
        print(f"| {name} | {spent:.1f} | {rate:.0f} |", flush=True)
    print(json.dumps({"device": torch.cuda.get_device_name() if CUDA else "cpu", "us": figures}))


if __name__ == "__main__":
    main()
