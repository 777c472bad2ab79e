"""Runs the cases of an evaluation on an engine: greedy, all exchanges of a case in one conversation."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fovea.cli.common import names
from fovea.core.constraints import AnswerFormat, Tool
from fovea.core.errors import FoveaError, InvalidRequest
from fovea.core.media import Image, PixelBudget, Video
from fovea.core.types import (
    AnswerBuilder,
    ChatPrompt,
    Completion,
    ImagePart,
    Message,
    Part,
    TemplateInputs,
    TextPart,
    VideoPart,
)
from fovea.evaluation.datasets import MOTION, Case
from fovea.evaluation.score import Result

if TYPE_CHECKING:
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
