"""Compare the engine with bf16, 8-bit and 4-bit weights on one machine, in one run.

    python benchmarks/quantization.py [--repeats 5] [--threads 2] [--folder PATH]

It uses the checkpoint and the questions of quick.py. The three engines take turns, so that other processes on
the machine disturb all of them alike. Ratios are medians divided by the medians without quantization. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from checkpoint import write_checkpoint
from quick import ANSWER, CONCURRENT, Fovea, question

QUANTIZATIONS = ("none", "int8", "int4")
MEASURES = ("ttft_ms", "decode_tok_s", "8x_tok_s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/fovea-bench/qwen2.5-vl-0.5b-random"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = write_checkpoint(args.folder)
    engines: dict[str, Fovea] = {}
    for name in QUANTIZATIONS:
        started = time.perf_counter()
        engines[name] = Fovea(folder, args.threads, "cpu", name)
        print(f"{name}: loaded in {time.perf_counter() - started:.1f} s")
    padding = " the" * 20
    samples = {name: {measure: [] for measure in MEASURES} for name in QUANTIZATIONS}
    for engine in engines.values():
        engine.run([question(9999, padding)], 4)
    for repeat in range(args.repeats):
        base = 100 * (repeat + 1)
        for name, engine in engines.items():
            _, ttft, rate = engine.run([question(base, padding)], ANSWER)
            prompts = [question(base + 1 + i, padding) for i in range(CONCURRENT)]
            seconds, _, _ = engine.run(prompts, ANSWER)
            row = ttft[0] * 1000, rate[0], CONCURRENT * ANSWER / seconds
            for measure, value in zip(MEASURES, row, strict=True):
                samples[name][measure].append(value)
    report(samples)
    for engine in engines.values():
        engine.engine.shutdown()


def report(samples: dict[str, dict[str, list[float]]]) -> None:
    medians = {
        name: {measure: statistics.median(values) for measure, values in measures.items()}
        for name, measures in samples.items()
    }
    for measure in MEASURES:
        for name in samples:
            values, median = samples[name][measure], medians[name][measure]
            ratio = median / medians["none"][measure]
            print(
                f"{measure:14} {name:5} {median:9.1f}   ({min(values):.1f} - {max(values):.1f})   "
                f"{ratio:5.2f}x"
            )
    print(json.dumps({"medians": medians}))


if __name__ == "__main__":
    main()
