"""Compare ways to keep targets for gaps between tokens and for first tokens, on the real engine.

    python benchmarks/target.py [--requests 120] [--gap-factor 4] [--first-factor 20] [--percentile 95]
                                [--shares 0.5 0.8 1.0 1.5] [--threads 2] [--folder PATH]

It uses the checkpoint of quick.py. Requests with answers of 32 tokens arrive steadily (Poisson process) or in
bursts of eight, at shares of the rate at which the engine serves them without targets, which is measured
first. A quarter of the requests has a new 224x224 image. The target for gaps is `gap-factor` times the gap of
a single stream, and the one for first tokens `first-factor` times the first token of a single image request.
Five engines get the same arrivals, after a quarter of the requests as warm-up:

    targets      both targets; late requests are refused
    degrade      both targets; late requests lose detail, or are refused
    gaps only    the target for gaps alone
    batch rule   `BatchRule`, without a pace
    neither      no target and no pace

Shares are those of accepted requests. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from engines import image_prompt, parser, start, text_prompt, token_times
from fovea import Engine
from fovea.core.errors import Overloaded
from fovea.core.types import ChatPrompt
from fovea.engine.schedule.itl_limit import BatchRule

TOKENS, SIDE, BURST = 32, 224, 8
FREE = {"pace": 0.0, "max_queue": 0}


def request(seed: int) -> ChatPrompt:
    return image_prompt(seed, SIDE) if seed % 4 == 0 else text_prompt(f"{seed}: tell me more.")


def arrivals(kind: str, rate: float, requests: int, seed: int) -> list[float]:
    """Return arrival times in seconds, with `rate` requests per second in the mean."""
    random, times, at = Random(seed), [], 0.0
    size = BURST if kind == "burst" else 1
    while len(times) < requests:
        at += random.expovariate(rate / size)
        times += [at] * size
    return times[:requests]


async def serve(engine: Engine, times: Sequence[float], base: int) -> dict[str, Any]:
    """Send requests at the given times. Returns gaps, first tokens in seconds, refusals and tokens/s."""
    gaps: list[float] = []
    firsts: list[float] = []
    refused = tokens = 0
    began = time.perf_counter()

    async def one(number: int, at: float) -> None:
        nonlocal refused, tokens
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        sent_at = time.perf_counter()
        try:
            seen = await token_times(engine, request(base + number), TOKENS)
        except Overloaded:
            refused += 1
            return
        firsts.append(seen[0] - sent_at)
        gaps.extend(b - a for a, b in zip(seen, seen[1:], strict=False))
        tokens += len(seen)

    await asyncio.gather(*(one(number, at) for number, at in enumerate(times)))
    return {
        "gaps": gaps,
        "firsts": firsts,
        "refused": refused / len(times),
        "tokens_per_s": tokens / (time.perf_counter() - began),
    }


def measure(args: Any) -> tuple[float, float, float]:
    """Return a single stream's gap and an image's first token in seconds, and requests/s at saturation."""
    (engine,) = start(args, {"alone": FREE}).values()
    asyncio.run(token_times(engine, request(1), TOKENS))
    seen = asyncio.run(token_times(engine, request(2), 2 * TOKENS))
    gap = statistics.median(b - a for a, b in zip(seen, seen[1:], strict=False))
    firsts = []
    for seed in range(400_000_000, 400_000_020, 4):
        sent_at = time.perf_counter()
        firsts.append(asyncio.run(token_times(engine, request(seed), 1))[0] - sent_at)
    row = asyncio.run(serve(engine, [0.0] * args.requests, 300_000_000))
    engine.shutdown()
    return gap, statistics.median(firsts), row["tokens_per_s"] / TOKENS


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--requests", type=int, default=120)
    arguments.add_argument("--gap-factor", type=float, default=4.0)
    arguments.add_argument("--first-factor", type=float, default=20.0)
    arguments.add_argument("--percentile", type=float, default=95.0)
    arguments.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.8, 1.0, 1.5])
    args = arguments.parse_args()
    gap, first, most = measure(args)
    gap_ms, first_ms = round(1e3 * args.gap_factor * gap), round(1e3 * args.first_factor * first)
    print(
        f"one stream alone: {1e3 * gap:.1f} ms between tokens, first token with an image after "
        f"{1e3 * first:.0f} ms; targets {gap_ms} and {first_ms} ms for {args.percentile:g}%; "
        f"saturation without targets: {most:.2f} requests/s"
    )
    asked = {"target_itl_ms": gap_ms, "target_percentile": args.percentile, "max_queue": 0}
    both = asked | {"target_ttft_ms": first_ms}
    variants = {
        "targets": both,
        "degrade": both | {"when_late": "degrade"},
        "gaps only": asked,
        "batch rule": FREE,
        "neither": FREE,
    }
    results: dict[str, Any] = {"target_itl_ms": gap_ms, "target_ttft_ms": first_ms, "saturation": most}
    for name, settings in variants.items():
        (engine,) = start(args, {name: settings}).values()
        if name == "batch rule":
            engine.loop.stepper.batch = BatchRule(gap_ms / 1e3, engine.config.schedule.max_running)
        warm_up = arrivals("poisson", 0.5 * most, max(8, args.requests // 4), seed=1)
        asyncio.run(serve(engine, warm_up, 100_000_000))
        for round_number, (kind, share) in enumerate(
            (kind, share) for kind in ("poisson", "burst") for share in args.shares
        ):
            times = arrivals(kind, share * most, args.requests, seed=2 + round_number)
            row = asyncio.run(serve(engine, times, 1_000_000 * (1 + round_number)))
            gaps, firsts = 1e3 * np.array(row.pop("gaps")), 1e3 * np.array(row.pop("firsts"))
            results[f"{name}, {kind}, {share:.0%}"] = row = row | {
                "gaps_within": float(np.mean(gaps <= gap_ms)),
                "firsts_within": float(np.mean(firsts <= first_ms)),
                "gap_p50_ms": float(np.percentile(gaps, 50)),
                "gap_p99_ms": float(np.percentile(gaps, 99)),
                "ttft_p50_ms": float(np.percentile(firsts, 50)),
                "ttft_p99_ms": float(np.percentile(firsts, 99)),
                "margin": engine.stats()["step_time_margin"],
            }
            print(
                f"{name:10} {kind:7} {share:4.0%}  gaps within {row['gaps_within']:6.1%}, "
                f"p50 {row['gap_p50_ms']:6.1f} p99 {row['gap_p99_ms']:7.1f} ms; "
                f"first tokens within {row['firsts_within']:6.1%}, p50 {row['ttft_p50_ms']:7.0f} ms; "
                f"refused {row['refused']:5.1%}; {row['tokens_per_s']:6.1f} tok/s",
                flush=True,
            )
        engine.shutdown()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
