"""Asks the same questions under many settings of visual tokens, for accuracy and for times."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fovea.cli.questions import CaseRunner, progress, visual_of
from fovea.core.media import PixelBudget, VisualTokens
from fovea.core.types import StageTimings
from fovea.evaluation.datasets import Case
from fovea.evaluation.sweep import MedianTimes, Outcome, Setting, Sweep

if TYPE_CHECKING:
    from fovea.core.protocols import CacheStage
    from fovea.engine.engine import Engine

COLD: tuple[CacheStage, ...] = ("kv", "pixels", "encoder", "regions", "host")
"""Cleared before a request is timed."""
SAME_FOR_ALL = {"visual_tokens": "off", "degrade_from": 0.0, "embed_disk_dir": ""}
"""Engine settings of a sweep: no other policy reduces tokens, and no cache on disk makes timed requests
faster.
"""
PROGRESS_LINES = 10
"""Number of progress lines that a sweep prints if stderr is no terminal."""


class SweepRun:
    """One sweep over an engine.

    runner: runs the scored cases and notes failures, which count as wrong answers.
    settings: the settings to compare.
    budget: detail level and pixels of every image.
    concurrency: cases in flight.
    """

    def __init__(
        self,
        engine: Engine,
        runner: CaseRunner,
        settings: Sequence[Setting],
        budget: PixelBudget,
        *,
        concurrency: int,
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._settings = tuple(settings)
        self._budgets = [replace(budget, visual=_wish(setting)) for setting in settings]
        self._concurrency = concurrency

    async def run(self, cases: Iterable[Case], total: int, timed: Sequence[Case], timed_on: str) -> Sweep:
        """Measure times first, then accuracy.

        cases: the `total` scored cases; they are generated as they are needed.
        timed: the timed cases, one request at a time; only the first exchange of each.
        timed_on: the timed cases in words.
        Raises FoveaError if a timed case cannot be asked, for example because the model does not support a
        method.
        """
        times = await self._times(timed)
        with progress("asking", total) as advance:
            outcomes = await self._outcomes(iter(cases), _with_progress_lines(advance, total))
        return Sweep(self._settings, outcomes, times, timed_on)

    async def _times(self, cases: Sequence[Case]) -> tuple[MedianTimes, ...]:
        """Time the cases.

        Settings take turns, so other work on the machine affects all. The first turn does not count.
        """
        runner = CaseRunner(self._engine, max_tokens=1)
        tokens: list[list[int]] = [[] for _ in self._settings]
        timings: list[list[StageTimings]] = [[] for _ in self._settings]
        with progress("timing", (1 + len(cases)) * len(self._settings)) as advance:
            for turn, case in enumerate((cases[0], *cases)):
                first = replace(case, exchanges=case.exchanges[:1])
                visual = await asyncio.to_thread(visual_of, case)
                for place, budget in enumerate(self._budgets):
                    await asyncio.to_thread(self._engine.clear_caches, *COLD)
                    [answer] = [reply async for reply in runner.converse(first, visual, budget)]
                    if turn:
                        tokens[place].append(answer.usage.image)
                        timings[place].append(answer.timings)
                    advance()
        return tuple(MedianTimes.from_requests(*both) for both in zip(tokens, timings, strict=True))

    async def _outcomes(self, cases: Iterator[Case], advance: Callable[[], None]) -> tuple[Outcome, ...]:
        """Score the cases.

        A case runs under all settings before the next one, so its images are generated once.
        """
        outcomes: dict[int, Outcome] = {}
        turn, drawing = 0, asyncio.Lock()

        async def worker() -> None:
            nonlocal turn
            while True:
                async with drawing:
                    case = await asyncio.to_thread(next, cases, None)
                    number, turn = turn, turn + 1
                if case is None:
                    return
                outcomes[number] = await self._outcome(case)
                advance()

        await asyncio.gather(*(worker() for _ in range(self._concurrency)))
        return tuple(outcomes[number] for number in sorted(outcomes))

    async def _outcome(self, case: Case) -> Outcome:
        visual = await self._runner.visual(case)
        if visual is None:
            count = len(self._settings)
            return Outcome(case.kind, (False,) * count, (0,) * count)
        results = [await self._runner.run(case, visual, budget) for budget in self._budgets]
        return Outcome(
            case.kind,
            tuple(result.correct for result in results),
            tuple(result.image_tokens for result in results),
        )


def _wish(setting: Setting) -> VisualTokens | None:
    return None if setting.method is None else VisualTokens(setting.method, keep=setting.keep)


def _with_progress_lines(advance: Callable[[], None], total: int) -> Callable[[], None]:
    """Return the function to call after each question: it moves the bar, or prints a line now and then."""
    if sys.stderr.isatty():
        return advance
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        if done * PROGRESS_LINES // total > (done - 1) * PROGRESS_LINES // total:
            print(f"{done} of {total} questions", file=sys.stderr, flush=True)

    return count
