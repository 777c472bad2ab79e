"""fovea batch IN.jsonl OUT.jsonl: many questions, resumable, in order.

A line of IN is `{"image": "a.png", "question": "..."}`; `images` takes several, `messages` a whole conversation with
parts `{"type": "text", "text": ...}` and `{"type": "image", "image": PATH}`, `params` sampling parameters, `id` a name.
Paths are relative to IN. Line n of OUT answers line n of IN: `{"line", "id", "text", "finish_reason", "usage"}`, or
`{"line", "id", "error"}`. Running it again goes on after the last whole line of OUT.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fovea.api.convert import usage_body
from fovea.api.responses import error_body
from fovea.cli.common import (
    add_engine_options,
    add_sampling_options,
    config_file,
    load_engine,
    pixel_budget,
    sampling_values,
)
from fovea.core.answer import AnswerBuilder
from fovea.core.errors import FoveaError, InvalidRequest

FIELDS = ("id", "image", "images", "question", "messages", "params")


def register(commands: Any) -> None:
    parser = commands.add_parser("batch", help="answer a file of questions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("input", type=Path, metavar="IN.jsonl")
    parser.add_argument("output", type=Path, metavar="OUT.jsonl")
    parser.add_argument(
        "--concurrency", type=int, default=16, metavar="N", help="questions in flight (default: 16)"
    )
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        lines = args.input.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{args.input} can not be read: {error}") from error
    if args.input.resolve() == args.output.resolve():
        raise InvalidRequest("IN and OUT are the same file")
    done = resume_at(args.output)
    if done > len(lines):
        raise InvalidRequest(
            f"{args.output} has {done} lines, {args.input} only {len(lines)}: not its output"
        )
    if done:
        print(f"fovea: {done} of {len(lines)} lines are answered already", file=sys.stderr)
    with load_engine(args, config_file(args)) as engine:
        failed = asyncio.run(_answer_all(engine, args, lines, done))
    if failed:
        print(
            f"fovea: {failed} lines could not be answered; see their error in {args.output}", file=sys.stderr
        )
    return 1 if failed else 0


def resume_at(output: Path) -> int:
    """Whole lines in OUT; a last line that was cut off by a crash is removed."""
    if not output.exists():
        return 0
    data = output.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with output.open("r+b") as file:
            file.truncate(len(whole))
    return whole.count(b"\n")


async def _answer_all(engine: Any, args: argparse.Namespace, lines: list[str], done: int) -> int:
    """Keep `concurrency` questions in flight and write answers in the order of the questions."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    failed = 0
    with (
        args.output.open("a") as out,
        Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress,
    ):
        bar = progress.add_task("answering", total=len(lines), completed=done)
        window: list[asyncio.Task[dict[str, Any]]] = []
        coming = _coming(engine, args, lines, done)
        _fill(window, coming, args.concurrency)
        while window:
            body = await window.pop(0)
            _fill(window, coming, args.concurrency)
            failed += "error" in body
            out.write(json.dumps(body, ensure_ascii=False) + "\n")
            out.flush()
            progress.advance(bar)
    return failed


def _coming(
    engine: Any, args: argparse.Namespace, lines: list[str], done: int
) -> Iterator[Callable[[], asyncio.Task[dict[str, Any]]]]:
    for number, line in enumerate(lines[done:], done + 1):
        yield lambda number=number, line=line: asyncio.create_task(_answer(engine, args, number, line))  # type: ignore[misc]


def _fill(window: list[Any], coming: Iterator[Callable[[], Any]], size: int) -> None:
    while len(window) < max(1, size):
        start = next(coming, None)
        if start is None:
            return
        window.append(start())


async def _answer(engine: Any, args: argparse.Namespace, number: int, line: str) -> dict[str, Any]:
    """A line's answer, or its error: nothing that one line does stops the others."""
    head: dict[str, Any] = {"line": number}
    try:
        value = _parse(line)
        head["id"] = value.get("id", number)
        request = await asyncio.to_thread(_request, engine, args, value)
        answer = AnswerBuilder(request.sampling.n)
        async for delta in engine.stream(request):
            answer.add(delta)
    except FoveaError as error:
        return {**head, **error_body(error)}
    except Exception as error:  # noqa: BLE001 - one bad line does not stop the rest
        return {**head, **error_body(InvalidRequest(f"{type(error).__name__}: {error}"))}
    done = answer.build()
    texts = {"text": done.text} if len(done.texts) == 1 else {"texts": list(done.texts)}
    return {
        **head,
        **texts,
        "finish_reason": done.finish_reasons[0],
        "usage": usage_body(done.usage).model_dump(),
    }


def _parse(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("not a JSON object")
    unknown = sorted(set(value) - set(FIELDS))
    if unknown:
        raise InvalidRequest(f"unknown field {unknown[0]!r}; known: {', '.join(FIELDS)}", param=unknown[0])
    if ("question" in value) == ("messages" in value):
        raise InvalidRequest("either question or messages is required")
    return value


def _request(engine: Any, args: argparse.Namespace, value: dict[str, Any]) -> Any:
    folder = args.input.parent
    params = {**sampling_values(args), **value.get("params", {})}
    if "messages" in value:
        messages = [_rebased(message, folder) for message in value["messages"]]
        return engine.request(messages, budget=pixel_budget(args), **params)
    names = value.get("images", [value["image"]] if "image" in value else [])
    images = [folder / str(name) for name in names]
    return engine.request(str(value["question"]), images, budget=pixel_budget(args), **params)


def _rebased(message: Any, folder: Path) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = [
        {**part, "image": folder / str(part["image"])} if isinstance(part, dict) and "image" in part else part
        for part in message["content"]
    ]
    return {**message, "content": parts}
