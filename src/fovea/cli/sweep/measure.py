"""Asking the same questions under many settings of visual tokens: all of them for accuracy, a few alone for time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fovea.cli.questions import Asker, progress, visual_of
from fovea.core.image import PixelBudget, VisualTokens
from fovea.core.types import StageTimings
from fovea.evaluation.datasets import Case
from fovea.evaluation.sweep import MedianTimes, Outcome, Setting, Sweep

if TYPE_CHECKING:
    from fovea.core.protocols import CacheStage
    from fovea.engine.engine import Engine

COLD: tuple[CacheStage, ...] = ("kv", "pixels", "encoder", "host")
"""Cleared before a request is timed."""
SAME_FOR_ALL = {"visual_tokens": "off", "degrade_from": 0.0, "embed_disk_dir": ""}
"""Engine settings of a sweep: all tokens have to be all, whatever the load; and what was timed has to have been encoded."""
QUIET_TELLS = 10
"""How often a sweep says how far it is where there is no terminal."""


class SweepRun:
    """asker: of whole answers; it notes failures, which count as wrong. budget: pixels of every image."""

    def __init__(
        self,
        engine: Engine,
        asker: Asker,
        settings: Sequence[Setting],
        budget: PixelBudget,
        *,
        concurrency: int,
    ) -> None:
        self._engine = engine
        self._asker = asker
        self._settings = tuple(settings)
        self._budgets = [replace(budget, visual=_wish(setting)) for setting in settings]
        self._concurrency = concurrency

    async def run(self, cases: Iterable[Case], total: int, alone: Sequence[Case], timed_on: str) -> Sweep:
        """cases: `total` of them, drawn as they are needed. alone: those that are timed, first, one request at a time; the
        first exchange of each.

        Raises FoveaError where one of the latter cannot be asked: a method may be one that the model cannot do.
        """
        timed = await self._times(alone)
        with progress("asking", total) as advance:
            marks = await self._marks(iter(cases), _telling(advance, total))
        return Sweep(self._settings, marks, timed, timed_on)

    async def _times(self, cases: Sequence[Case]) -> tuple[MedianTimes, ...]:
        """Settings take turns, so that whatever else the machine does falls on all of them; a first turn does not count."""
        asker = Asker(self._engine, max_tokens=1)
        tokens: list[list[int]] = [[] for _ in self._settings]
        timings: list[list[StageTimings]] = [[] for _ in self._settings]
        with progress("timing", (1 + len(cases)) * len(self._settings)) as advance:
            for turn, case in enumerate((cases[0], *cases)):
                first = replace(case, exchanges=case.exchanges[:1])
                visual = await asyncio.to_thread(visual_of, case)
                for place, budget in enumerate(self._budgets):
                    await asyncio.to_thread(self._engine.clear_caches, *COLD)
                    [answer] = [said async for said in asker.converse(first, visual, budget)]
                    if turn:
                        tokens[place].append(answer.usage.image)
                        timings[place].append(answer.timings)
                    advance()
        return tuple(MedianTimes.from_requests(*both) for both in zip(tokens, timings, strict=True))

    async def _marks(self, cases: Iterator[Case], advance: Callable[[], None]) -> tuple[Outcome, ...]:
        """One question under all settings before the next: its pictures are drawn, and its image encoded, once."""
        found: dict[int, Outcome] = {}
        turn, drawing = 0, asyncio.Lock()

        async def worker() -> None:
            nonlocal turn
            while True:
                async with drawing:
                    case = await asyncio.to_thread(next, cases, None)
                    number, turn = turn, turn + 1
                if case is None:
                    return
                found[number] = await self._mark(case)
                advance()

        await asyncio.gather(*(worker() for _ in range(self._concurrency)))
        return tuple(found[number] for number in sorted(found))

    async def _mark(self, case: Case) -> Outcome:
        visual = await self._asker.visual(case)
        if visual is None:
            none = len(self._settings)
            return Outcome(case.kind, (False,) * none, (0,) * none)
        results = [await self._asker.ask(case, visual, budget) for budget in self._budgets]
        return Outcome(
            case.kind,
            tuple(result.correct for result in results),
            tuple(result.image_tokens for result in results),
        )


def _wish(setting: Setting) -> VisualTokens | None:
    return None if setting.method is None else VisualTokens(setting.method, keep=setting.keep)


def _telling(advance: Callable[[], None], total: int) -> Callable[[], None]:
    """What is called for every question: the bar, or a line now and then."""
    if sys.stderr.isatty():
        return advance
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        if done * QUIET_TELLS // total > (done - 1) * QUIET_TELLS // total:
            print(f"{done} of {total} questions", file=sys.stderr, flush=True)

    return count
