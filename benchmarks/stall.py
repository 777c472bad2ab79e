"""Measure the longest gap in a running stream while a new, large image arrives.

    python benchmarks/stall.py [--side 896] [--repeats 3] [--threads 2] [--folder PATH]

It uses the checkpoint of quick.py. A text stream decodes; after 40 tokens a request with a new side x side
image arrives. The longest gap of the stream is compared with its median gap. Each repeat measures three
engines in turn: one with default settings, one without a pace, and one with the policy first come, first
served and no pace. The last one behaves like an engine without these features, except that it still encodes
in slices. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from contextlib import aclosing

from engines import image_prompt, parser, start, text_prompt
from fovea import Engine

SETTINGS = {
    "default": {},
    "no pace": {"pace": 0.0},
    "no pace, fcfs": {"pace": 0.0, "policy": "fcfs"},
}
BEFORE, AFTER, TARGET = 40, 200, 4.0


async def gaps_while_an_image_arrives(
    engine: Engine, seed: int, side: int
) -> tuple[list[float], float, float]:
    """Run a stream and an image request. All results are in seconds.

    Returns (gaps of the stream from the image's arrival to its first token, median gap before, TTFT of the
    image).
    """
    loop = asyncio.get_running_loop()
    times: list[float] = []
    arrived, first = loop.create_future(), loop.create_future()

    async def stream() -> None:
        prompt = text_prompt("Tell me a story.")
        deltas = engine.stream(prompt, temperature=0.0, max_tokens=BEFORE + AFTER, ignore_eos=True)
        async with aclosing(deltas):
            async for delta in deltas:
                if delta.token_ids:
                    times.append(time.perf_counter())
                if len(times) == BEFORE and not arrived.done():
                    arrived.set_result(time.perf_counter())
                if first.done():
                    return

    async def other() -> None:
        started = await arrived
        prompt = image_prompt(seed, side)
        async for _ in engine.stream(prompt, temperature=0.0, max_tokens=1, ignore_eos=True):
            if not first.done():
                first.set_result(time.perf_counter() - started)

    await asyncio.gather(stream(), other())
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    return gaps[BEFORE - 1 :], statistics.median(gaps[5 : BEFORE - 1]), first.result()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--side", type=int, default=896)
    arguments.add_argument("--repeats", type=int, default=3)
    args = arguments.parse_args()
    engines = start(args, SETTINGS)
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in engines}
    for repeat in range(args.repeats + 1):
        for number, (name, engine) in enumerate(engines.items()):
            gaps, median, ttft = asyncio.run(
                gaps_while_an_image_arrives(engine, 10 * repeat + number, args.side)
            )
            if repeat:  # the first round warms up
                rows[name].append((max(gaps), median, ttft))
    results = {}
    for name, measured in rows.items():
        longest, median, ttft = (statistics.median(column) for column in zip(*measured, strict=True))
        results[name] = {
            "longest_ms": longest * 1e3,
            "median_ms": median * 1e3,
            "ratio": longest / median,
            "image_ttft_ms": ttft * 1e3,
        }
        print(
            f"{name:15} longest gap {longest * 1e3:7.1f} ms, median gap {median * 1e3:5.1f} ms: "
            f"{longest / median:6.1f}x; the image's first token after {ttft * 1e3:7.0f} ms"
        )
    print(f"target: below {TARGET:g}x, {'met' if results['default']['ratio'] < TARGET else 'MISSED'}")
    print(json.dumps(results))
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main()
