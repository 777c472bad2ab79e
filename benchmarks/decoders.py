"""Measure decoders with experts and with states against plain ones: layers alone, with random weights.

    python benchmarks/decoders.py [--threads 2] [--repeats 15] [--parts experts,hybrid]
        [--formats none,int8,int4]

experts   a decode step with 64 experts of width 384, where a row uses 8, against a dense decoder of width
          8 * 384: one row should cost the bytes of its own experts. Hidden size 1024, 12 layers, 128 tokens
          of context. "one by one" is the same decoder, but Python calls every layer and every expert.
hybrid    a decoder with the proportions of Qwen3.5 (three layers of Gated DeltaNet to one of gated attention,
          hidden size 1024, 24 layers) against plain attention with as many bytes of weights: decode steps of
          one row after 512 tokens, and prompts in steps of 512 tokens.

All decoders of a table take turns, so that other processes on the machine disturb all alike. Times are
medians; ratios are medians of the ratios of neighbouring repetitions, with their quartiles. The shares are
those of the functions of C++ in a step; "python" is the rest, Python and small operations of torch. A decoder
that runs as one call of C++ has no shares. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch

import fovea  # before torch: it sets how torch's threads wait
from decoder_build import (
    Subject,
    Times,
    build,
    decoder_config,
    interleaved,
    native_kernels,
    one_by_one,
    shares,
    weight_bytes,
)
from fovea.engine.layers.config import Attention, Dense, Experts, GatedDelta
from fovea.kernels.native.instruction_sets import chosen
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.quantize import INT4, INT8

FORMATS = {"none": None, "int8": INT8, "int4": INT4}
HIDDEN, TARGET = 1024, 1.2
EXPERTS = Experts(count=64, active=8, intermediate=384, activation="silu")
PLAIN = Attention(16, 4, 128, 128**-0.5, qk_norm=True)
GATED = Attention(8, 2, 256, 256**-0.5, qk_norm=True, gated=True)
DELTA = GatedDelta(16, 128, 16, 128, 4, "silu")
DEPTH, EVERY = 24, 4
# The plain decoder's intermediate size makes its weights as large as those of the hybrid one.
HYBRID_WIDTH, PLAIN_WIDTH = 3584, 5056


def table(times: dict[str, Times], against: str) -> dict[str, Any]:
    """Print the times, and their ratios to those of `against`. Returns them."""
    rows = {}
    for name, found in times.items():
        ratio, low, high = found.over(times[against])
        print(
            f"    {name:28}{1e3 * found.median:9.2f} ms{ratio:8.2f}x  ({low:.2f} to {high:.2f})", flush=True
        )
        rows[name] = {"ms": 1e3 * found.median, "ratio": ratio, "quartiles": [low, high]}
    return rows


def print_shares(kernels: NativeKernels, name: str, call: Callable[[], None], calls: int) -> dict[str, float]:
    found = shares(kernels, call, calls)
    shown = ", ".join(f"{part} {share:.1%}" for part, share in found.items() if share >= 0.005)
    print(f"    shares of {name}: {shown}", flush=True)
    return found


def experts(kernels: NativeKernels, formats: list[str], repeats: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in formats:
        mixed, dense = (
            build(decoder_config(HIDDEN, [(PLAIN, block)] * 12), kernels, FORMATS[name])
            for block in (EXPERTS, Dense(EXPERTS.active * EXPERTS.intermediate, "silu"))
        )
        sizes = weight_bytes(mixed) / 2**20, weight_bytes(dense) / 2**20
        print(f"experts, weights {name}: {sizes[0]:.0f} MiB, dense {sizes[1]:.0f} MiB")
        for rows in (1, 4, 16):
            one, other = Subject(mixed, rows, 160), Subject(dense, rows, 160)
            step, plain = one.decode_step(rows, 128), other.decode_step(rows, 128)
            calls = {
                "experts": step,
                "dense": plain,
                "dense, one by one": one_by_one(other, plain),
                "experts, one by one": one_by_one(one, step),
            }
            print(f"  {rows} rows")
            found: dict[str, Any] = table(interleaved(calls, repeats, 4), "dense")
            found["shares"] = {
                each: print_shares(kernels, each, calls[each], 20)
                for each in ("experts, one by one", "dense, one by one")
            }
            results[f"{name}, {rows} rows"] = found
    return results


def hybrid(kernels: NativeKernels, repeats: int) -> dict[str, Any]:
    mixers = [GATED if number % EVERY == EVERY - 1 else DELTA for number in range(DEPTH)]
    block = Dense(HYBRID_WIDTH, "silu")
    options = {"centered_norms": True, "rotated": 64}
    made = build(decoder_config(HIDDEN, [(mixer, block) for mixer in mixers], **options), kernels)
    plain = build(decoder_config(HIDDEN, [(PLAIN, Dense(PLAIN_WIDTH, "silu"))] * DEPTH), kernels)
    print(f"hybrid: {weight_bytes(made) / 2**20:.0f} MiB, plain {weight_bytes(plain) / 2**20:.0f} MiB")
    one, other = Subject(made, 1, 4096), Subject(plain, 1, 4096)
    print("  decode of 1 row")
    calls = {"hybrid": one.decode_step(1, 512), "plain": other.decode_step(1, 512)}
    calls["plain, one by one"] = one_by_one(other, calls["plain"])
    results: dict[str, Any] = {"decode": table(interleaved(calls, repeats, 2), "plain")}
    results["decode"]["shares"] = {
        name: print_shares(kernels, name, calls[name], 10) for name in ("hybrid", "plain, one by one")
    }
    for tokens in (512, 4096):
        calls = {"hybrid": one.prefill(tokens, 512), "plain": other.prefill(tokens, 512)}
        print(f"  prompt of {tokens} tokens")
        times = interleaved(calls, max(2, repeats // 3 if tokens == 512 else repeats // 5))
        results[f"prompt {tokens}"] = found = table(times, "plain")
        for name, taken in times.items():
            found[name]["tokens_per_s"] = tokens / taken.median
            print(f"    {name:28}{tokens / taken.median:9.0f} tokens/s")
        found["shares"] = print_shares(kernels, "hybrid", calls["hybrid"], 1)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--parts", default="experts,hybrid", help="parts, by commas")
    parser.add_argument("--formats", default="none,int8,int4", help="formats of the experts, by commas")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    kernels, instructions = native_kernels(), chosen()
    assert instructions is not None
    print(
        f"Fovea {fovea.__version__}, {instructions.name}, {args.threads} threads, {args.repeats} repetitions"
    )
    results: dict[str, Any] = {"instructions": instructions.name, "threads": args.threads}
    parts = args.parts.split(",")
    if "experts" in parts:
        results["experts"] = found = experts(kernels, args.formats.split(","), args.repeats)
        for name in args.formats.split(","):
            ratio = found[f"{name}, 1 rows"]["experts"]["ratio"]
            verdict = "met" if ratio <= TARGET else "missed"
            print(f"experts, one row, weights {name}: {ratio:.2f}x of dense, target {TARGET}x: {verdict}")
    if "hybrid" in parts:
        results["hybrid"] = hybrid(kernels, args.repeats)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
