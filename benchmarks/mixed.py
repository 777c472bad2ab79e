"""Measure a text chat beside arriving images, on the real engine: gaps of the chat, and throughput.

    python benchmarks/mixed.py [--seconds 40] [--load 0.5] [--threads 2] [--folder PATH]

It uses the checkpoint of quick.py. One client chats in text, one answer of 64 tokens after another. Requests
with a new 448x448 image and an answer of 16 tokens arrive at random (Poisson process), at `load` times the
rate at which the engine can serve them alone, which is measured first. Two engines get the same arrivals: one
with default settings, and one with the policy first come, first served and no pace. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import time
from random import Random

import numpy as np

from engines import image_prompt, parser, start, text_prompt, token_times
from fovea import Engine

SETTINGS = {"default": {}, "fcfs, no pace": {"policy": "fcfs", "pace": 0.0}}
CHAT_TOKENS, IMAGE_TOKENS, SIDE = 64, 16, 448


async def mixed(engine: Engine, arrivals: list[float], seconds: float, base: int) -> dict[str, float]:
    started = time.perf_counter()
    gaps: list[float] = []
    firsts: list[float] = []
    tokens = 0

    async def chat() -> None:
        nonlocal tokens
        number = 0
        while time.perf_counter() - started < seconds:
            number += 1
            times = await token_times(engine, text_prompt(f"{number}: go on."), CHAT_TOKENS)
            gaps.extend(b - a for a, b in zip(times, times[1:], strict=False))
            tokens += len(times)

    async def image(number: int, at: float) -> None:
        nonlocal tokens
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        arrived = time.perf_counter()
        times = await token_times(engine, image_prompt(base + number, SIDE), IMAGE_TOKENS)
        firsts.append(times[0] - arrived)
        tokens += len(times)

    await asyncio.gather(chat(), *(image(number, at) for number, at in enumerate(arrivals)))
    spent = time.perf_counter() - started
    return {
        "text gap p50 ms": 1e3 * float(np.percentile(gaps, 50)),
        "text gap p99 ms": 1e3 * float(np.percentile(gaps, 99)),
        "text gap longest ms": 1e3 * max(gaps),
        "image first token p50 ms": 1e3 * float(np.percentile(firsts, 50)),
        "tokens/s": tokens / spent,
        "images/s": len(arrivals) / spent,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=40.0)
    arguments.add_argument("--load", type=float, default=0.5)
    args = arguments.parse_args()
    engines = start(args, SETTINGS)
    alone = []
    for number, engine in enumerate(engines.values()):
        for repeat in range(4):
            started = time.perf_counter()
            asyncio.run(token_times(engine, image_prompt(10_000 + 10 * number + repeat, SIDE), IMAGE_TOKENS))
            if repeat:
                alone.append(time.perf_counter() - started)
    rate = args.load / float(np.median(alone))
    rng, at, arrivals = Random(7), 0.0, []
    while (at := at + rng.expovariate(rate)) < args.seconds:
        arrivals.append(at)
    print(
        f"an image request alone takes {np.median(alone):.2f} s; {len(arrivals)} arrive in {args.seconds:g} s"
    )
    results = {}
    for number, (name, engine) in enumerate(engines.items()):
        results[name] = asyncio.run(mixed(engine, arrivals, args.seconds, 1000 * (number + 1)))
        print(name, *(f"{key} {value:.1f}" for key, value in results[name].items()), sep="  ")
    ours, plain = results.values()
    print(f"text gap p99: {plain['text gap p99 ms'] / ours['text gap p99 ms']:.1f}x better")
    print(f"throughput: {ours['tokens/s'] / plain['tokens/s']:.2f}x")
    print(json.dumps(results))
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main()
