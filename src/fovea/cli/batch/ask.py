"""Asks the questions of `fovea batch`, several at a time."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from fovea.api.convert import usage_body
from fovea.api.errors import error_body
from fovea.cli.batch.questions import check_question, sampling_params
from fovea.core.errors import FoveaError, InvalidRequest
from fovea.core.json_text import parse_object
from fovea.core.media import PixelBudget
from fovea.core.types import AnswerBuilder


async def answers(
    runner: LineRunner, questions: Iterable[tuple[int, bytes]], concurrency: int, *, total: int, done: int = 0
) -> AsyncIterator[dict[str, Any]]:
    """Yield the lines of OUT for questions, in their order, with a progress bar.

    questions: number and line of each.
    concurrency: number of questions in flight.
    total, done: lines of IN, and how many of them are answered.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("answering", total=total, completed=done)
        left = iter(questions)
        window = [asyncio.create_task(runner.answer(*pair)) for pair in itertools.islice(left, concurrency)]
        while window:
            body = await window.pop(0)
            window += [asyncio.create_task(runner.answer(*pair)) for pair in itertools.islice(left, 1)]
            progress.advance(bar)
            yield body


class LineRunner:
    """Turns a line of IN into a line of OUT.

    folder: the folder to which paths are relative.
    params: sampling parameters of the flags.
    budget: image budget of the flags.
    prompt: the question of lines that have none; None: they are errors.
    """

    def __init__(
        self,
        engine: Any,
        folder: Path,
        params: dict[str, Any],
        budget: PixelBudget,
        prompt: str | None = None,
    ) -> None:
        self._engine = engine
        self._folder = folder
        self._params = params
        self._budget = budget
        self._prompt = prompt

    async def answer(self, number: int, line: bytes) -> dict[str, Any]:
        """Return the answer to a line, or its error. An error of one line does not stop the others."""
        head: dict[str, Any] = {"line": number, "id": number}
        try:
            value = parse_object(line)
            head["id"] = value.get("id", number)
            if self._prompt is not None and "messages" not in value:
                value.setdefault("question", self._prompt)
            check_question(value)
            request = await asyncio.to_thread(self._request, value)
            answer = AnswerBuilder(request.sampling.n)
            async for delta in self._engine.stream(request):
                answer.add(delta)
        except FoveaError as error:
            return {**head, **error_body(error)}
        except Exception as error:  # noqa: BLE001 - one bad line does not stop the rest
            return {**head, **error_body(InvalidRequest(f"{type(error).__name__}: {error}"))}
        done = answer.build()
        usage = usage_body(done.usage).model_dump()
        if len(done.texts) == 1:
            return {**head, "text": done.text, "finish_reason": done.finish_reasons[0], "usage": usage}
        reasons = list(done.finish_reasons)
        return {**head, "texts": list(done.texts), "finish_reasons": reasons, "usage": usage}

    def _request(self, value: dict[str, Any]) -> Any:
        params = {**self._params, **sampling_params(value.get("params", {}))}
        if "messages" in value:
            messages = [self._rebased(message) for message in value["messages"]]
            return self._engine.request(messages, budget=self._budget, **params)
        images = [
            self._path(name) for name in value.get("images", [value["image"]] if "image" in value else [])
        ]
        return self._engine.request(value["question"], images, budget=self._budget, **params)

    def _rebased(self, message: Any) -> Any:
        if not isinstance(message, dict) or not isinstance(message.get("content"), list):
            return message
        parts = [
            {**part, "image": self._path(part["image"])}
            if isinstance(part, dict) and "image" in part
            else part
            for part in message["content"]
        ]
        return {**message, "content": parts}

    def _path(self, name: Any) -> Path:
        if not isinstance(name, str):
            raise InvalidRequest(f"an image is {name!r}; accepted: a path", param="image")
        return self._folder / name
