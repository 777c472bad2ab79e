"""Measure the host work of a decode step: processor time of the engine's thread, without the model.

    python benchmarks/host_work.py [--rows 1,32,256] [--steps 100] [--repeats 7] [--stop] [--profile 256]

The bundled model answers texts, with decodes padded as for CUDA graphs. While only decodes run, its decoder
and its head are replaced by prepared hidden states and logits, so the engine's thread has nothing left but
the host's work: plan, arrays of the step, sampling, bookkeeping, events. An idle GPU, or a fast CPU,
waits for this work. Clients read their streams in one event loop of the same process, and objects that
live as long as the process are excluded from garbage collection, both as in a server.

Times are those of the thread's own clock, so other processes do not count, although they disturb caches.
Each figure is the median of all steps of all repeats. Calls that wake the event loop are counted, too. With
--stop every request has a stop string that does not occur. With --profile the calls of the engine's thread
are listed for that number of rows. The last line is JSON.
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
from fovea.server.run import keep_for_life

QUESTION = "Count from one to a thousand, please."
WORDS = "one two three four five six seven eight nine ten"
ANSWER, WARM_UP = 4000, 20
TARGETS_MS = {1: 0.25, 256: 4.0}


class Prepared:
    """Replaces decoder and head while `on`, and returns prepared numbers of the right shapes."""

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


class Watch:
    """Measures the steps of an engine's thread while its model is prepared.

    step_s: processor time of each step. wake_ups: calls in these steps that woke the event loop.
    """

    def __init__(self, engine: Engine, prepared: Prepared, profiler: cProfile.Profile | None) -> None:
        self.step_s: list[float] = []
        self.wake_ups = 0
        step = engine.loop._step

        def measured() -> None:
            if not prepared.on:
                step()
                return
            began = time.thread_time()
            if profiler is None:
                step()
            else:
                profiler.runcall(step)
            self.step_s.append(time.thread_time() - began)

        engine.loop._step = measured  # type: ignore[method-assign]

    def count(self, loop: asyncio.AbstractEventLoop, prepared: Prepared) -> None:
        """Count from now on the calls that wake an event loop."""
        wake = loop.call_soon_threadsafe

        def counted(*args: Any, **named: Any) -> Any:
            self.wake_ups += prepared.on
            return wake(*args, **named)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]


class Crowd:
    """Clients that read one answer each, in the running event loop."""

    def __init__(self, engine: Engine, rows: int, *, stop: bool) -> None:
        self._engine = engine
        self._rows = rows
        self._options: dict[str, Any] = {"stop": ("never written",)} if stop else {}
        self._reading = 0
        self._all_read = asyncio.Event()

    async def enter(self) -> None:
        """Begin all answers, and wait until each has its first token."""
        self._tasks = [asyncio.create_task(self._read(number)) for number in range(self._rows)]
        begun = asyncio.create_task(self._all_read.wait())
        ended, _ = await asyncio.wait([begun, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()  # no client ends before all have begun, unless by an error

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._engine.unfinished:
            await asyncio.sleep(0.002)

    async def _read(self, number: int) -> None:
        stream = self._engine.stream(
            f"{number}: {QUESTION}", temperature=0.0, max_tokens=ANSWER, ignore_eos=True, **self._options
        )
        first = True
        async for _ in stream:
            self._reading += first
            first = False
            if self._reading == self._rows:
                self._all_read.set()


class Figures(NamedTuple):
    """Milliseconds of each step, and wake-ups per step."""

    ms: list[float]
    wake_ups: float


async def measure(
    engine: Engine, prepared: Prepared, watch: Watch, rows: int, steps: int, stop: bool
) -> Figures:
    """Run `rows` answers at once."""
    crowd = Crowd(engine, rows, stop=stop)
    await crowd.enter()
    watch.count(asyncio.get_running_loop(), prepared)
    watch.step_s, watch.wake_ups = [], 0
    prepared.on = True
    while len(watch.step_s) < WARM_UP + steps:
        await asyncio.sleep(0.01)
    prepared.on = False
    await crowd.leave()
    return Figures([1000 * seconds for seconds in watch.step_s[WARM_UP:]], watch.wake_ups / len(watch.step_s))


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
    profiler = cProfile.Profile(time.thread_time) if args.profile else None
    settings: dict[str, Any] = {"threads": 1, "decode_graphs": "padded", "kv_cache_mib": 1024}
    found: dict[int, list[Figures]] = {rows: [] for rows in sizes}
    with Engine.from_pretrained("fovea-tiny", max_running=max(sizes), **settings) as engine:
        prepared = Prepared(engine)
        watch = Watch(engine, prepared, profiler)
        keep_for_life()
        for _ in range(1 if args.profile else args.repeats):
            for rows in sizes:
                run = measure(engine, prepared, watch, rows, args.steps, args.stop)
                found[rows].append(asyncio.run(run))
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
        return
    results = {}
    for rows, figures in found.items():
        times = sorted(ms for one in figures for ms in one.ms)
        low, median, high = (times[len(times) * tenths // 10] for tenths in (1, 5, 9))
        wake_ups = statistics.mean(one.wake_ups for one in figures)
        target = f"; target {TARGETS_MS[rows]:g}" if rows in TARGETS_MS else ""
        mean = statistics.mean(times)
        results[rows] = {"p10": low, "median": median, "p90": high, "mean": mean, "wake_ups": wake_ups}
        print(
            f"{rows:4} rows: {median:6.3f} ms per step (p10 {low:.3f}, p90 {high:.3f}, mean {mean:.3f}"
            f"{target}), {wake_ups:.1f} wake-ups"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
