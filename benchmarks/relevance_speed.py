"""What deciding costs: texture, ways of knowing, balancing and attending, on one core.

    OMP_NUM_THREADS=1 python benchmarks/relevance_speed.py [--width 896] [--height 896] [--cell 28] [--repeats 50] [--device cpu]

Medians and the quickest of the repeats, in milliseconds; the steps take turns, so that a neighbour on the machine disturbs
all of them. The picture is a held-out page with small text; half of its tokens are given away. `texture, torch` is
fovea.kernels.texture on --device, the picture being there already. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from fovea.evaluation.scenes import HELD_OUT_SEED, generate
from fovea.kernels.texture import texture as in_torch
from fovea.relevance.balancing import Balancer, Tensions, Ways
from fovea.relevance.coupling import couple_without_head
from fovea.relevance.knowing import keywords, perspectival, propositional
from fovea.relevance.pipeline import survey
from fovea.relevance.policy import attend, content_mask
from fovea.relevance.texture import texture

DIMENSIONS, WORDS, VIEW = 512, 16, (8, 8)
"""Of the features of a thumbnail and of a question's embeddings."""
TARGET_MS = 7.0
"""Of the texture of 896x896 pixels on one core."""


def steps(pixels: np.ndarray, cell: int, question: str, device: str) -> dict[str, Callable[[], object]]:
    surveyed = survey(pixels, cell)
    seen, asked = surveyed.texture, surveyed.keyword_map(question)
    ways = Ways(surveyed.propositional, surveyed.perspectival, asked)
    balancer = Balancer()
    total = seen.grid[0] * seen.grid[1] // 2

    def decided() -> Tensions:
        return balancer.tensions(question, None, surveyed.statistics(total))

    tensions = decided()
    worth, held = balancer.balance(ways, tensions), content_mask(ways)
    draw = np.random.default_rng(0)
    features, words = (
        draw.normal(size=(n, DIMENSIONS)).astype(np.float32) for n in (VIEW[0] * VIEW[1], WORDS)
    )
    there = torch.from_numpy(pixels.copy()).to(device)

    def on_device() -> None:
        in_torch(there, cell)
        if device != "cpu":
            torch.cuda.synchronize()

    return {
        "texture": lambda: texture(pixels, cell),
        "texture, torch": on_device,
        "propositional": lambda: propositional(seen),
        "perspectival": lambda: perspectival(seen),
        "keywords": lambda: keywords(seen, question),
        "coupling": lambda: couple_without_head(features, words, VIEW, asked),
        "tensions": decided,
        "balancing": lambda: balancer.balance(ways, tensions),
        "attending": lambda: attend(worth, held, total, tensions.compress),
    }


def milliseconds(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if repeat >= 2:
                found[name].append(1000 * (time.perf_counter() - started))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--height", type=int, default=896)
    parser.add_argument("--cell", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    [sample] = generate(HELD_OUT_SEED, 1, ("small_text",), [(args.width, args.height)])
    pixels = np.asarray(sample.images[0].convert("RGB"))
    took = milliseconds(steps(pixels, args.cell, sample.turns[0].question, args.device), args.repeats)
    print(
        f"{args.width}x{args.height} pixels, cells of {args.cell}; torch on {args.device}; {args.repeats} repeats"
    )
    print(f"{'step':<16}{'median ms':>11}{'quickest ms':>13}")
    for name, samples in took.items():
        print(f"{name:<16}{statistics.median(samples):11.2f}{min(samples):13.2f}")
    medians = {name: statistics.median(samples) for name, samples in took.items()}
    total = sum(medians[name] for name in medians if name != "texture, torch")
    print(f"{'all, in numpy':<16}{total:11.2f}")
    print(f"texture below {TARGET_MS:g} ms: {'yes' if medians['texture'] < TARGET_MS else 'no'}")
    print(json.dumps({"width": args.width, "height": args.height, "cell": args.cell, "median_ms": medians,
                      "quickest_ms": {name: min(samples) for name, samples in took.items()}}))  # fmt: skip


if __name__ == "__main__":
    main()
