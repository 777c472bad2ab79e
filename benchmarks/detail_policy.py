"""Compare `--policy detail` with first come, first served, on the real engine with small and large images.

    python benchmarks/detail_policy.py [--requests 60] [--shares 0.5 0.8 1.2] [--threads 2] [--folder PATH]

It uses the checkpoint of quick.py. Each request has a new image and an answer of 16 tokens. Three of four
images have 224x224 pixels, the others 672x672, nine times as many visual tokens. They arrive at random
(Poisson process), at shares of the rate at which the engine serves them first come, first served, which is
measured first. Engines with the policies fcfs, dual and detail get the same arrivals. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from engines import image_prompt, parser, start, token_times
from fovea import Engine

TOKENS, SMALL, LARGE = 16, 224, 672
POLICIES = ("fcfs", "dual", "detail")


def side(number: int) -> int:
    return LARGE if number % 4 == 3 else SMALL


async def serve(engine: Engine, times: Sequence[float], base: int) -> tuple[dict[int, list[float]], float]:
    """Send requests at the given times. Returns times to first token in seconds by size, and tokens/s."""
    firsts: dict[int, list[float]] = {SMALL: [], LARGE: []}
    began = time.perf_counter()

    async def one(number: int, at: float) -> None:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        sent_at = time.perf_counter()
        seen = await token_times(engine, image_prompt(base + number, side(number)), TOKENS)
        firsts[side(number)].append(seen[0] - sent_at)

    await asyncio.gather(*(one(number, at) for number, at in enumerate(times)))
    return firsts, len(times) * TOKENS / (time.perf_counter() - began)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--requests", type=int, default=60)
    arguments.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.8, 1.2])
    args = arguments.parse_args()
    engines = start(args, {name: {"policy": name, "max_queue": 0} for name in POLICIES})
    asyncio.run(serve(engines["fcfs"], [0.0] * 4, 900_000))
    _, rate = asyncio.run(serve(engines["fcfs"], [0.0] * args.requests, 910_000))
    most = rate / TOKENS
    print(f"saturation, first come, first served: {most:.2f} requests/s")
    results: dict[str, Any] = {"saturation": most}
    for round_number, share in enumerate(args.shares):
        random, at, times = Random(round_number), 0.0, []
        for _ in range(args.requests):
            at += random.expovariate(share * most)
            times.append(at)
        for name, engine in engines.items():
            firsts, rate = asyncio.run(serve(engine, times, 10_000 * (1 + round_number)))
            row = {"tokens_per_s": rate}
            for size, label in ((SMALL, "small"), (LARGE, "large")):
                row |= {
                    f"{label}_p50_ms": 1e3 * float(np.percentile(firsts[size], 50)),
                    f"{label}_p99_ms": 1e3 * float(np.percentile(firsts[size], 99)),
                }
            results[f"{name}, {share:.0%}"] = row
            print(
                f"{share:4.0%}  {name:6} first token: small p50 {row['small_p50_ms']:8.0f} "
                f"p99 {row['small_p99_ms']:8.0f} ms, large p50 {row['large_p50_ms']:8.0f} "
                f"p99 {row['large_p99_ms']:8.0f} ms; {rate:6.1f} tok/s",
                flush=True,
            )
    print(json.dumps(results))
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main()
