"""The longest gap in a running stream while a new, large image arrives.

    python benchmarks/stall.py [--side 896] [--repeats 3] [--threads 2] [--folder PATH]

The checkpoint of quick.py. A text stream decodes; after 40 tokens a request with a new side x side image comes in. Its
gaps between tokens are compared with the median gap. Each repeat measures three engines in turn: as it is by default,
without a pace, and first come first served without a pace, which is what an engine without any of this does, short of
encoding in one piece. The last line is JSON.
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
    """(gaps of the stream from the image's arrival to its first token, median gap before, the image's TTFT), seconds."""
    loop = asyncio.get_running_loop()
    times: list[float] = []
    arrived, first = loop.create_future(), loop.create_future()

    async def stream() -> None:
        prompt = text_prompt("Tell me a story.")
        said = engine.stream(prompt, temperature=0.0, max_tokens=BEFORE + AFTER, ignore_eos=True)
        async with aclosing(said):
            async for delta in said:
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
    found = {}
    for name, measured in rows.items():
        longest, median, ttft = (statistics.median(column) for column in zip(*measured, strict=True))
        found[name] = {"longest_ms": longest * 1e3, "median_ms": median * 1e3, "ratio": longest / median,
                       "image_ttft_ms": ttft * 1e3}  # fmt: skip
        print(
            f"{name:15} longest gap {longest * 1e3:7.1f} ms, median gap {median * 1e3:5.1f} ms: {longest / median:6.1f}x; "
            f"the image's first token after {ttft * 1e3:7.0f} ms"
        )
    print(f"target: below {TARGET:g}x, {'met' if found['default']['ratio'] < TARGET else 'MISSED'}")
    print(json.dumps(found))
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main()
