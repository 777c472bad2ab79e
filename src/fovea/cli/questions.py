"""Cases put to an engine, as `fovea eval` does it: greedy, every exchange of a case in one conversation."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fovea.cli.common import names
from fovea.core.answer import AnswerBuilder
from fovea.core.errors import FoveaError, InvalidRequest
from fovea.core.image import Image, PixelBudget
from fovea.core.types import ChatPrompt, Completion, ImagePart, Message, Part, TextPart, VideoPart
from fovea.core.video import Video
from fovea.evaluation.datasets import MOTION, Case
from fovea.evaluation.score import Result

if TYPE_CHECKING:
    from fovea.engine.engine import Engine

SHOWN_FAILURES = 10
Visual = Sequence[Image | Video]
"""A case's images, decoded."""


class Asker:
    """Asks cases one by one. failures: (case id, why) of those that could not be asked to their end."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self._engine = engine
        self._max_tokens = max_tokens
        self.failures: list[tuple[str, str]] = []

    async def ask(self, case: Case, visual: Visual, budget: PixelBudget) -> Result:
        """Every exchange, on the model's own earlier answers."""
        said: list[Completion] = []
        try:
            async for answer in self.converse(case, visual, budget):
                said.append(answer)
        except FoveaError as error:
            self.failures.append((case.id, error.message))
        return Result(
            case,
            tuple(answer.text for answer in said),
            sum(answer.usage.prompt for answer in said),
            sum(answer.usage.image for answer in said),
            sum(answer.usage.completion for answer in said),
        )

    async def converse(self, case: Case, visual: Visual, budget: PixelBudget) -> AsyncIterator[Completion]:
        """An answer per exchange. Raises FoveaError."""
        messages: list[Message] = []
        for index, exchange in enumerate(case.exchanges):
            shown = _parts(visual, budget) if index == 0 else []
            messages.append(Message("user", (*shown, TextPart(exchange.question))))
            builder = AnswerBuilder(1)
            async for delta in self._engine.stream(
                ChatPrompt(tuple(messages)), temperature=0.0, max_tokens=self._max_tokens
            ):
                builder.add(delta)
            answer = builder.build()
            messages.append(Message("assistant", (TextPart(answer.text),)))
            yield answer

    async def visual(self, case: Case) -> Visual | None:
        """None, and a failure noted, where they cannot be read."""
        try:
            return await asyncio.to_thread(visual_of, case)
        except FoveaError as error:
            self.failures.append((case.id, error.message))
            return None

    def show_failures(self) -> None:
        for name, why in self.failures[:SHOWN_FAILURES]:
            print(f"fovea: case {name} could not be asked: {why}", file=sys.stderr)
        if len(self.failures) > SHOWN_FAILURES:
            print(f"fovea: and {len(self.failures) - SHOWN_FAILURES} more", file=sys.stderr)


def check_data(args: argparse.Namespace) -> None:
    """Raises InvalidRequest for what is said of scenes beside a file of questions."""
    if args.kinds:
        raise InvalidRequest("--kinds is of generated scenes; a file of --data has its own", param="kinds")
    if args.video:
        raise InvalidRequest("--video is of generated scenes; a file of --data has images", param="video")


def kinds_asked(args: argparse.Namespace, usual: Sequence[str]) -> tuple[str, ...]:
    """Kinds of scenes. Raises InvalidRequest where --video has none to show."""
    kinds = names(args.kinds) if args.kinds else tuple(usual)
    if args.video and MOTION not in kinds:
        raise InvalidRequest(f"--video shows {MOTION} as a video; --kinds leaves it out", param="video")
    return kinds


def visual_of(case: Case) -> Visual:
    """Raises FoveaError for what cannot be read."""
    from fovea.engine.request.inputs import to_image, to_video

    if case.video:
        return [to_video(list(case.images))]
    return [to_image(image) for image in case.images]


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, if that is a terminal; call what it gives for every one that is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as shown:
        bar = shown.add_task(what, total=total)
        yield lambda: shown.advance(bar)


def _parts(visual: Visual, budget: PixelBudget) -> list[Part]:
    return [ImagePart(one, budget) if isinstance(one, Image) else VideoPart(one) for one in visual]
