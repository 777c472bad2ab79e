"""Measure the host work of a decode step: processor time of the engine's thread, without the model.

    python benchmarks/host_work.py [--rows 1,32,256] [--steps 100] [--repeats 7] [--stop] [--profile 256]

The bundled model answers texts, with decodes padded as for CUDA graphs. While only decodes run, its decoder
and its head are replaced by prepared hidden states and logits, so the engine's thread has nothing left but
the host's work: inbox, plan, arrays of the step, sampling, bookkeeping, events. An idle GPU, or a fast CPU,
waits for this work. Clients read their streams in one event loop of the same process, and what is there for
life is left out of garbage collections, both as in a server.

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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fovea import Engine
from fovea.server.garbage import keep_for_life

QUESTION = "Count from one to a thousand, please."
WORDS = "one two three four five six seven eight nine ten"
ANSWER, WARM_UP = 4000, 20
TARGETS_MS = {1: 0.25, 256: 4.0}


class Prepared:
    """Stands for decoder and head while `on`, and returns prepared numbers of the right shapes."""

    def __init__(self, engine: Engine) -> None:
        model = engine.runner.model
        rows, config = engine.config.schedule.max_running, model.decoder.config
        states = torch.zeros(rows, config.hidden, dtype=model.dtype)
        scores = torch.rand(rows, config.vocab_size, generator=torch.Generator().manual_seed(7))
        scores[:, engine.tokenizer.encode_plain(WORDS)] += 1.0  # answers are words
        embed, decode, logits = model.decoder.embed, model.decoder.forward, model.logits
        self.on = False

        def prepared_embed(ids: Tensor) -> Tensor:
            return states[: len(ids)] if self.on else embed(ids)

        def prepared_decode(x: Tensor, *rest: Any, **named: Any) -> Tensor:
            return states[: len(x)] if self.on else decode(x, *rest, **named)

        def prepared_logits(hidden: Tensor) -> Tensor:
            return scores[: len(hidden)] if self.on else logits(hidden)

        model.decoder.embed = prepared_embed  # type: ignore[method-assign]
        model.decoder.forward = prepared_decode  # type: ignore[method-assign]
        model.logits = prepared_logits  # type: ignore[method-assign]


class Look(NamedTuple):
    """The state of the engine's thread between two steps.

    seconds: its processor time.
    steps, wake_ups: number of steps so far, and of calls that woke the event loop.
    """

    seconds: float
    steps: int
    wake_ups: int


class Crowd:
    """Clients that read one answer each, in the running event loop. wake_ups: calls that woke the loop."""

    def __init__(self, engine: Engine, rows: int, *, stop: bool) -> None:
        self.engine = engine
        self.rows = rows
        self.wake_ups = 0
        self._options: dict[str, Any] = {"stop": ("never written",)} if stop else {}
        self._reading = 0
        self._all_read = asyncio.Event()
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(*args: Any, **named: Any) -> Any:
            self.wake_ups += 1
            return wake(*args, **named)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]

    async def enter(self) -> None:
        """Begin all answers, and wait until each has its first token."""
        self._tasks = [asyncio.create_task(self._read(number)) for number in range(self.rows)]
        begun = asyncio.create_task(self._all_read.wait())
        ended, _ = await asyncio.wait([begun, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()  # no client ends before all have begun, unless by an error

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self.engine.unfinished:
            await asyncio.sleep(0.002)

    async def look(self, after: int) -> Look:
        """Return the state of the engine's thread after so many further steps."""
        stepper, looks = self.engine.loop.stepper, list[Look]()
        end = stepper.steps + after
        while stepper.steps < end:
            await asyncio.sleep(0.002)
        before = self.wake_ups

        def note() -> None:
            looks.append(Look(time.thread_time(), stepper.steps, before))

        await asyncio.to_thread(self.engine.loop.call, note)
        return looks[0]

    async def _read(self, number: int) -> None:
        stream = self.engine.stream(
            f"{number}: {QUESTION}", temperature=0.0, max_tokens=ANSWER, ignore_eos=True, **self._options
        )
        first = True
        async for _ in stream:
            self._reading += first
            first = False
            if self._reading == self.rows:
                self._all_read.set()


async def measure(engine: Engine, prepared: Prepared, rows: int, steps: int, stop: bool) -> dict[str, float]:
    """Run `rows` answers at once, and return milliseconds and wake-ups per step."""
    crowd = Crowd(engine, rows, stop=stop)
    await crowd.enter()
    prepared.on = True
    begin = await crowd.look(WARM_UP)
    end = await crowd.look(steps)
    prepared.on = False
    await crowd.leave()
    count = end.steps - begin.steps
    return {
        "ms": 1000 * (end.seconds - begin.seconds) / count,
        "wake_ups": (end.wake_ups - begin.wake_ups) / count,
    }


def profile(engine: Engine, prepared: Prepared, rows: int, steps: int, stop: bool) -> None:
    """Print the calls of the engine's thread."""
    profiler, step = cProfile.Profile(time.thread_time), engine.loop._step

    def profiled() -> None:
        if prepared.on:
            profiler.runcall(step)
        else:
            step()

    engine.loop._step = profiled  # type: ignore[method-assign]
    asyncio.run(measure(engine, prepared, rows, steps, stop))
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--profile", type=int, default=0)
    args = parser.parse_args()
    sizes = [args.profile] if args.profile else [int(rows) for rows in args.rows.split(",")]
    settings: dict[str, Any] = {"threads": 1, "decode_graphs": "padded", "kv_cache_mib": 1024}
    with Engine.from_pretrained("fovea-tiny", max_running=max(sizes), **settings) as engine:
        prepared = Prepared(engine)
        keep_for_life()
        if args.profile:
            profile(engine, prepared, args.profile, args.steps, args.stop)
            return
        results: dict[int, list[dict[str, float]]] = {rows: [] for rows in sizes}
        for _ in range(args.repeats):
            for rows in sizes:
                results[rows].append(asyncio.run(measure(engine, prepared, rows, args.steps, args.stop)))
    for rows, figures in results.items():
        times = [figure["ms"] for figure in figures]
        wake_ups = statistics.median(figure["wake_ups"] for figure in figures)
        target = f"; target {TARGETS_MS[rows]:g}" if rows in TARGETS_MS else ""
        print(
            f"{rows:4} rows: {statistics.median(times):6.3f} ms per step "
            f"({min(times):.3f} to {max(times):.3f}{target}), {wake_ups:.1f} wake-ups"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
