"""Time the steps of a relevance decision on one core: texture, ways of knowing, balancing and attending.

    OMP_NUM_THREADS=1 python benchmarks/relevance_speed.py [--width 896] [--height 896] [--cell 28]
                                                           [--repeats 50]

It prints the median and the quickest of the repeats, in milliseconds. The steps take turns, so that other
processes on the machine disturb all of them alike. The image is a held-out page with small text, and half of
its tokens are kept. No model takes part: the attention of the look is that of one token of its view. The look
itself is timed by benchmarks/relevance.py. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from fovea.evaluation.scenes import HELD_OUT_SEED, generate
from fovea.relevance.balancing import Ways, balance
from fovea.relevance.knowing import participatory, perspectival, propositional, readable_at
from fovea.relevance.pipeline import survey, tensions
from fovea.relevance.policy import Cells, attend, content_mask, look_shape
from fovea.relevance.texture import texture

TARGET_MS = 7.0
"""Target for the texture of 896x896 pixels on one core."""


def steps(pixels: np.ndarray, cell: int, question: str) -> dict[str, Callable[[], object]]:
    surveyed = survey(pixels, cell)
    maps = surveyed.texture
    asked = np.zeros(look_shape(maps.grid), np.float32)
    asked[asked.shape[0] // 2, asked.shape[1] // 2] = 1.0
    ways = Ways(surveyed.propositional, surveyed.perspectival, participatory(asked, maps))
    decided = tensions(question, surveyed, asked)
    content = content_mask(ways.propositional, ways.perspectival)
    cells = Cells(balance(ways, decided), content, ways.participatory, readable_at(maps))
    total = maps.grid[0] * maps.grid[1] // 2
    return {
        "texture": lambda: texture(pixels, cell),
        "propositional": lambda: propositional(maps),
        "perspectival": lambda: perspectival(maps),
        "participatory": lambda: participatory(asked, maps),
        "tensions": lambda: tensions(question, surveyed, asked),
        "balancing": lambda: balance(ways, decided),
        "readable at": lambda: readable_at(maps),
        "attending": lambda: attend(cells, total, decided.compress),
    }


def milliseconds(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """The durations of each call, in repeats in which all calls take turns; two more repeats warm up."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if repeat >= 2:
                samples[name].append(1000 * (time.perf_counter() - started))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--height", type=int, default=896)
    parser.add_argument("--cell", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    [sample] = generate(HELD_OUT_SEED, 1, ("small_text",), [(args.width, args.height)])
    pixels = np.asarray(sample.images[0].convert("RGB"))
    durations = milliseconds(steps(pixels, args.cell, sample.turns[0].question), args.repeats)
    print(f"{args.width}x{args.height} pixels, cells of {args.cell}; {args.repeats} repeats")
    print(f"{'step':<16}{'median ms':>11}{'quickest ms':>13}")
    for name, samples in durations.items():
        print(f"{name:<16}{statistics.median(samples):11.2f}{min(samples):13.2f}")
    medians = {name: statistics.median(samples) for name, samples in durations.items()}
    total = sum(medians.values())
    print(f"{'all':<16}{total:11.2f}")
    print(f"texture below {TARGET_MS:g} ms: {'yes' if medians['texture'] < TARGET_MS else 'no'}")
    quickest = {name: min(samples) for name, samples in durations.items()}
    shape = {"width": args.width, "height": args.height, "cell": args.cell}
    print(json.dumps({**shape, "median_ms": medians, "quickest_ms": quickest}))


if __name__ == "__main__":
    main()
