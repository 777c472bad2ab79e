"""Runs the cases of an evaluation on an engine: greedy, all exchanges of a case in one conversation.

A sweep asks the same questions under many settings of visual tokens, for accuracy and for times.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from fovea.cli.common import names
from fovea.core.constraints import AnswerFormat, Tool
from fovea.core.errors import FoveaError, InvalidRequest
from fovea.core.media import Image, PixelBudget, Video, VisualTokens
from fovea.core.types import (
    AnswerBuilder,
    ChatPrompt,
    Completion,
    ImagePart,
    Message,
    ModelInfo,
    Part,
    StageTimings,
    TemplateInputs,
    TextPart,
    VideoPart,
)
from fovea.evaluation.datasets import MOTION, Case
from fovea.evaluation.score import Result
from fovea.evaluation.sweep import MedianTimes, Outcome, Setting, Sweep

if TYPE_CHECKING:
    from fovea.core.protocols import CacheStage
    from fovea.engine.engine import Engine


SHOWN_FAILURES = 10
Visual = Sequence[Image | Video]
"""The decoded images or videos of a case."""


class CaseRunner:
    """Runs cases one by one.

    failures: (case id, error message) of the cases that could not be run to their end.
    """

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self._engine = engine
        self._max_tokens = max_tokens
        self.failures: list[tuple[str, str]] = []

    async def run(self, case: Case, visual: Visual, budget: PixelBudget) -> Result:
        """Run all exchanges of a case.

        The model sees its own earlier answers. An error is noted as a failure.
        """
        answers: list[Completion] = []
        try:
            async for answer in self.converse(case, visual, budget):
                answers.append(answer)
        except FoveaError as error:
            self.failures.append((case.id, error.message))
        return Result(
            case,
            tuple(answer.text for answer in answers),
            sum(answer.usage.prompt for answer in answers),
            sum(answer.usage.image for answer in answers),
            sum(answer.usage.completion for answer in answers),
        )

    async def converse(self, case: Case, visual: Visual, budget: PixelBudget) -> AsyncIterator[Completion]:
        """Yield the answer to each exchange of a case. Raises FoveaError."""
        messages: list[Message] = []
        tools = (Tool(tool["function"]["name"], {}, tool) for tool in case.tools)
        inputs = TemplateInputs(tools=tuple(tools))
        for index, exchange in enumerate(case.exchanges):
            images = _parts(visual, budget) if index == 0 else []
            messages.append(Message(exchange.role, (*images, TextPart(exchange.question))))
            form = None if exchange.schema is None else AnswerFormat.json_schema(exchange.schema)
            builder = AnswerBuilder(1)
            async for delta in self._engine.stream(
                ChatPrompt(tuple(messages), template=inputs),
                temperature=0.0,
                max_tokens=self._max_tokens,
                format=form,
            ):
                builder.add(delta)
            answer = builder.build()
            messages.append(Message("assistant", (TextPart(answer.text),)))
            yield answer

    async def visual(self, case: Case) -> Visual | None:
        """Return the decoded images of a case. None, with a failure noted, if they cannot be read."""
        try:
            return await asyncio.to_thread(visual_of, case)
        except FoveaError as error:
            self.failures.append((case.id, error.message))
            return None

    def show_failures(self) -> None:
        """Print the failures to stderr, the first SHOWN_FAILURES in full."""
        for name, message in self.failures[:SHOWN_FAILURES]:
            print(f"fovea: case {name} could not be asked: {message}", file=sys.stderr)
        if len(self.failures) > SHOWN_FAILURES:
            print(f"fovea: and {len(self.failures) - SHOWN_FAILURES} more", file=sys.stderr)


def check_data(args: argparse.Namespace) -> None:
    """Raise InvalidRequest if flags of generated scenes are given beside a file of questions."""
    if args.kinds:
        raise InvalidRequest("--kinds is for generated scenes; a file of --data has its own", param="kinds")
    if args.video:
        raise InvalidRequest("--video is for generated scenes; a file of --data has images", param="video")


def check_images(info: ModelInfo, cases: Sequence[Case]) -> None:
    """Raise InvalidRequest if a case has an image or a video, and the model takes text alone."""
    case = next((case for case in cases if case.images), None)
    if case is not None and "image" not in info.input_modalities:
        raise InvalidRequest(
            f"case {case.id} has an image, and the model {info.name} takes text alone; accepted: --data with "
            "questions without images, or --perplexity FILE",
            param="data",
        )


def requested_kinds(args: argparse.Namespace, default: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds of scenes.

    Raises InvalidRequest if --video is given and no kind can be shown as a video.
    """
    kinds = names(args.kinds) if args.kinds else tuple(default)
    if args.video and MOTION not in kinds:
        raise InvalidRequest(f"--video shows {MOTION} as a video; --kinds leaves it out", param="video")
    return kinds


def visual_of(case: Case) -> Visual:
    """Decode the images or the video of a case. Raises FoveaError if they cannot be read."""
    from fovea.engine.request.inputs import to_image, to_video

    if case.video:
        return [to_video(list(case.images))]
    return [to_image(image) for image in case.images]


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr, if stderr is a terminal. Call the yielded function after each item."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:
        bar = bars.add_task(what, total=total)
        yield lambda: bars.advance(bar)


def _parts(visual: Visual, budget: PixelBudget) -> list[Part]:
    return [ImagePart(one, budget) if isinstance(one, Image) else VideoPart(one) for one in visual]


COLD: tuple[CacheStage, ...] = ("kv", "pixels", "encoder", "regions", "host", "answers")
"""Cleared before a request is timed."""
SAME_FOR_ALL = {"visual_tokens": "off", "degrade_from": 0.0, "embed_disk_dir": ""}
"""Engine settings of a sweep: no other policy reduces tokens, and no cache on disk makes timed requests
faster.
"""
PROGRESS_LINES = 10
"""Number of progress lines that a sweep prints if stderr is not a terminal."""


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
