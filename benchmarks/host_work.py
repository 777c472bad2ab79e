"""Measure the host work of a decode step: processor time of the engine's thread, without the model.

    python benchmarks/host_work.py [--rows 1,32,256] [--steps 200] [--repeats 5] [--stop] [--profile 256]

The bundled model answers texts, with decodes padded as for CUDA graphs. While only decodes run, its decoder
and its head are replaced by prepared hidden states and logits, so the engine's thread has nothing left but
the host's work: inbox, plan, arrays of the step, sampling, bookkeeping, events. An idle GPU, or a fast CPU,
waits for this work. Clients read their streams in one event loop of the same process, as in a server.

Times are those of the thread's own clock, so other processes do not count, although they disturb caches.
Each figure is the median of the repeats, with the lowest and the highest. Calls that wake the event loop are
counted, too. With --stop every request has a stop string that does not occur. With --profile the calls of the
engine's thread are listed for that number of rows. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fovea import Engine

LAST_PROMPT = "Count from one to a thousand, please."
ANSWER, WARM_UP = 4000, 20
TARGETS_MS = {1: 0.25, 256: 4.0}


class Prepared:
    """Stands for decoder and head while `on`, and returns prepared numbers of the right shapes."""

    def __init__(self, engine: Engine) -> None:
        model = engine.runner.model
        self.on = False
        rows = engine.config.schedule.max_running
        config = model.decoder.config
        self._hidden = torch.zeros(rows, config.hidden, dtype=model.dtype)
        random = torch.Generator().manual_seed(7)
        self._logits = torch.rand(rows, config.vocab_size, generator=random)
        words = engine.tokenizer.encode_plain("one two three four five six seven eight nine ten")
        self._logits[:, words] += 1.0  # answers are words
        embed, forward, logits = model.decoder.embed, model.decoder.forward, model.logits

        def look_up(ids: Tensor) -> Tensor:
            return self._hidden[: len(ids)] if self.on else embed(ids)

        def decode(x: Tensor, *rest: Any, **named: Any) -> Tensor:
            return self._hidden[: len(x)] if self.on else forward(x, *rest, **named)

        def head(hidden: Tensor) -> Tensor:
            return self._logits[: len(hidden)] if self.on else logits(hidden)

        model.decoder.embed = look_up
        model.decoder.forward = decode
        model.logits = head  # type: ignore[method-assign]


def at_step_ends(engine: Engine, action: Callable[[], None]) -> None:
    """Run an action in the engine's thread, between two steps."""
    engine.loop.call(action)


async def measure(engine: Engine, prepared: Prepared, rows: int, steps: int, stop: bool) -> dict[str, float]:
    """Run `rows` answers at once, and return milliseconds and wake-ups per step."""
    loop = asyncio.get_running_loop()
    wake_ups = 0
    wake = loop.call_soon_threadsafe

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal wake_ups
        wake_ups += 1
        return wake(*args, **named)

    running = 0
    all_running = asyncio.Event()

    async def client(number: int) -> None:
        nonlocal running
        options: dict[str, Any] = {"stop": ("never written",)} if stop else {}
        stream = engine.stream(
            f"{number}: {LAST_PROMPT}", temperature=0.0, max_tokens=ANSWER, ignore_eos=True, **options
        )
        first = True
        async for _ in stream:
            if first:
                running += 1
                first = False
                if running == rows:
                    all_running.set()

    clients = [asyncio.create_task(client(number)) for number in range(rows)]
    begun = asyncio.create_task(all_running.wait())
    for ended in (await asyncio.wait([begun, *clients], return_when=asyncio.FIRST_COMPLETED))[0]:
        ended.result()  # no client ends before all have begun, unless by an error

    def look() -> tuple[float, int, int]:
        seen: list[tuple[float, int, int]] = []
        at_step_ends(engine, lambda: seen.append((time.thread_time(), engine.loop.stepper.steps, wake_ups)))
        return seen[0]

    async def after(count: int) -> tuple[float, int, int]:
        begin = engine.loop.stepper.steps
        while engine.loop.stepper.steps < begin + count:
            await asyncio.sleep(0.002)
        return await asyncio.to_thread(look)

    prepared.on = True
    await after(WARM_UP)
    loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
    begin = await asyncio.to_thread(look)
    end = await after(steps)
    loop.call_soon_threadsafe = wake  # type: ignore[method-assign]
    count = end[1] - begin[1]
    figures = {"ms": 1000 * (end[0] - begin[0]) / count, "wake_ups": (end[2] - begin[2]) / count}
    prepared.on = False
    for task in clients:
        task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    while engine.unfinished:
        await asyncio.sleep(0.002)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--profile", type=int, default=0)
    args = parser.parse_args()
    sizes = [int(rows) for rows in args.rows.split(",")]
    engine = Engine.from_pretrained(
        "fovea-tiny",
        threads=1,
        decode_graphs="padded",
        max_running=max(*sizes, args.profile, 1),
        kv_cache_mib=1024,
    )
    with engine:
        prepared = Prepared(engine)
        if args.profile:
            profiler = cProfile.Profile()
            step = engine.loop._step

            def profiled() -> None:
                if prepared.on:
                    profiler.runcall(step)
                else:
                    step()

            engine.loop._step = profiled  # type: ignore[method-assign]
            asyncio.run(measure(engine, prepared, args.profile, args.steps, args.stop))
            pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
            return
        found: dict[int, list[dict[str, float]]] = {rows: [] for rows in sizes}
        for _ in range(args.repeats):
            for rows in sizes:
                found[rows].append(asyncio.run(measure(engine, prepared, rows, args.steps, args.stop)))
    results = {}
    for rows, figures in found.items():
        times = sorted(one["ms"] for one in figures)
        wakes = statistics.median(one["wake_ups"] for one in figures)
        target = f", target {TARGETS_MS[rows]:g}" if rows in TARGETS_MS else ""
        print(
            f"{rows:4} rows: {statistics.median(times):6.3f} ms per step ({times[0]:.3f} to {times[-1]:.3f}{target}), "
            f"{wakes:.1f} wake-ups"
        )
        results[rows] = {"ms": times, "wake_ups": wakes}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
