"""Compare three ways to keep gaps between tokens below a target, on the real engine.

    python benchmarks/target.py [--clients 24] [--factor 3] [--rounds 3] [--threads 2] [--folder PATH]

It uses the checkpoint of quick.py. `clients` clients send requests at once, each `rounds` questions one after
another, with answers of 32 tokens. A quarter of the clients sends a new 224x224 image in every question. The
target is `factor` times the gap of a single stream, which is measured first. `Fovea` bounds steps and batch
(`--target-itl-ms`), `batch rule` is `BatchRule` without a pace, and `neither` has no bound. The last line is
JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time

import numpy as np

from engines import image_prompt, parser, start, text_prompt, token_times
from fovea import Engine
from fovea.engine.schedule.batch import BatchRule, DecodeBound
from fovea.engine.schedule.pace import Pace

TOKENS, SIDE = 32, 224


async def crowd(
    engine: Engine, clients: int, rounds: int, base: int
) -> tuple[list[float], list[float], float]:
    """Run all clients. Returns (gaps in seconds, times to first token in seconds, tokens per second)."""
    gaps: list[float] = []
    firsts: list[float] = []

    async def client(number: int) -> None:
        for turn in range(rounds):
            seed = base + 1000 * turn + number
            prompt = image_prompt(seed, SIDE) if number % 4 == 0 else text_prompt(f"{seed}: tell me more.")
            sent_at = time.perf_counter()
            times = await token_times(engine, prompt, TOKENS)
            firsts.append(times[0] - sent_at)
            gaps.extend(b - a for a, b in zip(times, times[1:], strict=False))

    started = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    return gaps, firsts, clients * rounds * TOKENS / (time.perf_counter() - started)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--clients", type=int, default=24)
    arguments.add_argument("--factor", type=float, default=3.0)
    arguments.add_argument("--rounds", type=int, default=3)
    args = arguments.parse_args()
    engines = start(args, {"Fovea": {}, "batch rule": {"pace": 0.0}, "neither": {"pace": 0.0}})
    alone = []
    for engine in engines.values():
        times = asyncio.run(token_times(engine, text_prompt("Tell me a story."), 64))
        alone.append(statistics.median(b - a for a, b in zip(times, times[1:], strict=False)))
    target = args.factor * statistics.median(alone)
    most = engines["Fovea"].config.schedule.max_running
    engines["Fovea"].loop.stepper.pace = Pace(2.5, target, engines["Fovea"].config.schedule.max_step_tokens)
    engines["Fovea"].loop.stepper.batch = DecodeBound(target, most)
    engines["batch rule"].loop.stepper.batch = BatchRule(target, most)
    print(
        f"one stream alone: {1e3 * target / args.factor:.1f} ms between tokens; target {1e3 * target:.1f} ms"
    )
    results = {"target_ms": 1e3 * target}
    for number, (name, engine) in enumerate(engines.items()):
        asyncio.run(crowd(engine, args.clients, 1, 10_000_000 + 100_000 * number))  # the bounds adapt
        gaps, firsts, rate = asyncio.run(crowd(engine, args.clients, args.rounds, 1_000_000 * number))
        results[name] = row = {
            "within": float(np.mean([gap <= target for gap in gaps])),
            "p50_ms": 1e3 * float(np.percentile(gaps, 50)),
            "p99_ms": 1e3 * float(np.percentile(gaps, 99)),
            "longest_ms": 1e3 * max(gaps),
            "ttft_p50_ms": 1e3 * statistics.median(firsts),
            "tokens_per_s": rate,
        }
        print(
            f"{name:10} gaps within the target {row['within']:6.1%}, p50 {row['p50_ms']:6.1f} "
            f"p99 {row['p99_ms']:7.1f} longest {row['longest_ms']:7.1f} ms; "
            f"first token p50 {row['ttft_p50_ms']:7.0f} ms; {rate:6.1f} tok/s"
        )
    print(json.dumps(results))
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main()
