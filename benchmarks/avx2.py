"""Compare Fovea's kernels with torch's float32 on a machine with AVX2 but without AVX-512, in one run.

    python benchmarks/avx2.py [--repeats 3] [--threads 2] [--folder PATH] [--instructions avx2]

A machine that has more is restricted, before torch is loaded: Fovea by FOVEA_NATIVE_KERNELS, torch by
ATEN_CPU_CAPABILITY, oneDNN by ONEDNN_MAX_CPU_ISA. Two comparisons: the 0.5 B checkpoint and the questions of
quick.py, in bf16, int8 and int4, against float32 in oneDNN's layout, which was Fovea's path on such machines
before it had kernels for them; and the first token of fovea-tiny, with new pictures. Engines take turns, so
that other processes on the machine disturb all of them alike. Ratios are medians divided by the medians of
float32. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

TARGETS = {"bf16": 1.8, "int8": 3.0, "int4": 5.0}
"""How many times as many tokens per second a single request is to decode."""
TINY_TARGET = 3.0
"""How many times sooner the first token of fovea-tiny is to come."""
TORCH = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "GOMP_SPINCOUNT": "0"}
"""Limits of torch and oneDNN; and idle threads of OpenMP sleep, as `import fovea` sets it."""
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "kernels": "onednn"},
    "bf16": {"dtype": "bfloat16", "kernels": "native"},
    "int8": {"dtype": "bfloat16", "kernels": "native", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "kernels": "native", "quantization": "int4"},
}


def restrict(instructions: str) -> None:
    """Start this program again with the environment of a machine without AVX-512, unless it has it."""
    wanted = {"FOVEA_NATIVE_KERNELS": instructions, **TORCH}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def large(folder: Path, threads: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Measure the 0.5 B model: milliseconds to the first token, and tokens per second, by engine."""
    from checkpoint import write_checkpoint
    from quick import ANSWER, CONCURRENT, Fovea, question

    write_checkpoint(folder)
    engines = {
        name: Fovea(folder, threads, "cpu", settings.get("quantization", "none"), **plain(settings))
        for name, settings in ENGINES.items()
    }
    samples: dict[str, dict[str, list[float]]] = {
        name: {"ttft_ms": [], "decode_tok_s": [], "8x_tok_s": []} for name in engines
    }
    padding = " the" * 20
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            base = 100 * repeat
            _, ttft, rate = engine.run([question(base, padding)], ANSWER)
            prompts = [question(base + 1 + i, padding) for i in range(CONCURRENT)]
            seconds, _, _ = engine.run(prompts, ANSWER)
            if repeat:  # the first round warms up
                samples[name]["ttft_ms"].append(1000 * ttft[0])
                samples[name]["decode_tok_s"].append(rate[0])
                samples[name]["8x_tok_s"].append(CONCURRENT * ANSWER / seconds)
    for engine in engines.values():
        engine.engine.shutdown()
    return samples


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "quantization"}


def tiny(threads: int, repeats: int) -> dict[str, list[float]]:
    """Measure fovea-tiny: milliseconds to the first token of each of 12 questions about new pictures."""
    from fovea import Engine
    from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
    from fovea.engine.request.inputs import to_image
    from fovea.evaluation.scenes import HELD_OUT_SEED, generate

    prompts = [
        ChatPrompt(
            (Message("user", (*(ImagePart(to_image(i)) for i in s.images), TextPart(s.turns[0].question))),)
        )
        for s in generate(HELD_OUT_SEED, 12, ("describe", "counting", "reading"))
    ]
    engines = {
        name: Engine.from_pretrained(
            "fovea-tiny", threads=threads, device="cpu", kv_cache_mib=64, **ENGINES[name]
        )
        for name in ("float32", "bf16")
    }
    samples: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(repeats + 1):
        for prompt in prompts:
            for name, engine in engines.items():
                engine.clear_caches()
                started = time.perf_counter()
                engine.generate(prompt, temperature=0, max_tokens=1)
                if repeat:
                    samples[name].append(1000 * (time.perf_counter() - started))
    for engine in engines.values():
        engine.shutdown()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/fovea-bench/qwen2.5-vl-0.5b-random"))
    parser.add_argument("--instructions", default="avx2", help="avx2 or avx2_vnni")
    args = parser.parse_args()
    restrict(args.instructions)
    print(
        f"{args.instructions}; {args.threads} threads; medians of {args.repeats} rounds (lowest to highest)"
    )
    samples = large(args.folder, args.threads, args.repeats)
    ratios: dict[str, dict[str, float]] = {}
    for name, measures in samples.items():
        ratios[name] = {}
        for measure, values in measures.items():
            middle = statistics.median(values)
            ratio = ratios[name][measure] = middle / statistics.median(samples["float32"][measure])
            print(
                f"{name:8} {measure:13} {middle:9.1f} ({min(values):.1f} to {max(values):.1f})  {ratio:5.2f}x"
            )
    for name, target in TARGETS.items():
        reached = ratios[name]["decode_tok_s"]
        print(
            f"decode in {name}: {reached:.2f}x, target {target}x: {'met' if reached >= target else 'MISSED'}"
        )
    first = tiny(args.threads, args.repeats)
    middle = {name: statistics.median(values) for name, values in first.items()}
    sooner = middle["float32"] / middle["bf16"]
    print(
        f"fovea-tiny, first token: float32 {middle['float32']:.1f} ms, bf16 {middle['bf16']:.1f} ms: "
        f"{sooner:.2f} times sooner, target {TINY_TARGET}: {'met' if sooner >= TINY_TARGET else 'MISSED'}"
    )
    print(json.dumps({"ratios": ratios, "tiny_ms": middle, "samples": samples}))


if __name__ == "__main__":
    main()
