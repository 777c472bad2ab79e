"""Time how long each method of visual-token reduction takes to choose tokens, and its taps and its probe.

    python benchmarks/reduction.py [--rows 42] [--columns 28] [--width 256] [--keep 0.5] [--threads 2]
    [--repeats 7]

The embeddings are random, because no method is quicker on easier ones. The last rows are measured with the
bundled model on random pixels of the same grid: the encoder itself, and the taps and the probe that some
methods need. Each figure is the quickest of the repeats. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch

from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model
from fovea.engine.models.qwen_vl import QwenVL
from fovea.engine.reduce.base import Probe, ReductionInput
from fovea.engine.reduce.methods import reducer
from fovea.engine.reduce.probe import encoder_taps, run_probe
from fovea.engine.vision.encoding import VisualFeatures, run_to_end
from fovea.engine.visual_budget.methods import METHODS, keep_count

WORDS = 12


def tokens(rows: int, columns: int, width: int) -> ReductionInput:
    count = rows * columns
    probe = Probe(torch.randn(count + WORDS, width), torch.randn(count + WORDS, 2, 64), torch.rand(count), 0)
    return ReductionInput(
        torch.randn(count, width), (rows, columns), "benchmark", query=torch.randn(WORDS, width),
        attention=torch.rand(count), keys=torch.randn(count, 64), probe=probe,
    )  # fmt: skip


def method_calls(visual: ReductionInput, keep: int) -> dict[str, Callable[[], object]]:
    names = [name for name, method in METHODS.items() if method.kind == "encoder"]
    return {name: partial(reducer(name).reduce, visual, keep) for name in names}


def model_calls(rows: int, columns: int) -> dict[str, Callable[[], object]]:
    model = load_model("fovea-tiny", EngineConfig()).model
    if not isinstance(model, QwenVL):
        raise SystemExit("the bundled model has no Qwen vision encoder")
    tower, grid = model.vision, (1, 2 * rows, 2 * columns)
    patches = torch.randn(4 * rows * columns, tower.patch_embed.proj.in_features).to(
        model.device, model.dtype
    )
    embeds, deepstack = run_to_end(tower.slices(patches, grid))
    visual, words = VisualFeatures(embeds, tuple(deepstack)), list(range(WORDS))
    return {
        "encoder": lambda: run_to_end(tower.slices(patches, grid)),
        "taps": lambda: encoder_taps(tower, patches, grid),
        "probe": lambda: run_probe(model, words, visual, words, (rows, columns)),
    }


def quickest(call: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=42)
    parser.add_argument("--columns", type=int, default=28)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    keep = keep_count(args.rows * args.columns, args.keep)
    print(f"{keep} of {args.rows}x{args.columns} tokens of width {args.width}, {args.threads} threads")
    visual = tokens(args.rows, args.columns, args.width)
    calls = method_calls(visual, keep) | model_calls(args.rows, args.columns)
    seconds = {}
    for name, call in calls.items():
        seconds[name] = quickest(call, args.repeats)
        print(f"{name:>12} {seconds[name] * 1e3:9.2f} ms")
    print(json.dumps({"keep": keep, "width": args.width, "threads": args.threads, "seconds": seconds}))


if __name__ == "__main__":
    main()
