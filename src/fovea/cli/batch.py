"""fovea batch IN.jsonl OUT.jsonl: many questions, resumable, in order.

A line of IN is {"image": "a.png", "question": "..."}. `images` takes several,
`params` sampling parameters, `id` a name. `messages`, instead of a question,
takes a whole conversation whose parts are {"type": "text", "text": "..."} and
{"type": "image", "image": "a.png"}. Paths are relative to IN.

Line n of OUT answers line n of IN: {"line", "id", "text", "finish_reason",
"usage"}, or {"line", "id", "error"}; with params.n there are "texts" and
"finish_reasons". A second run continues after the last whole line of OUT.

Exit codes: 0 every line is answered, 1 some are errors, 2 nothing was asked.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fovea.api.convert import usage_body
from fovea.api.responses import error_body
from fovea.cli.common import (
    SINGLE_USER,
    add_engine_options,
    add_sampling_options,
    config_file,
    count,
    load_engine,
    pixel_budget,
    run_and_close,
    sampling_values,
)
from fovea.core.answer import AnswerBuilder
from fovea.core.errors import FoveaError, InvalidRequest
from fovea.core.image import PixelBudget

FIELDS = ("id", "image", "images", "question", "messages", "params")
TYPES: tuple[tuple[str, type, str], ...] = (
    ("image", str, "a path"),
    ("images", list, "a list of paths"),
    ("question", str, "text"),
    ("messages", list, "a list of messages"),
    ("params", dict, "an object of sampling parameters"),
)


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "batch",
        help="answer a file of questions",
        description=__doc__,
        usage="fovea batch [OPTIONS] IN.jsonl OUT.jsonl",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("input", type=Path, metavar="IN.jsonl", help="questions, one JSON object per line")
    parser.add_argument(
        "output", type=Path, metavar="OUT.jsonl", help="answers; the file is created, or continued"
    )
    parser.add_argument(
        "--concurrency", type=count, default=16, metavar="N", help="questions in flight (default: 16)"
    )
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    file, params = config_file(args), sampling_values(args)
    lines = _lines(args.input)
    _check_output(args.input, args.output)
    done, failed = resume_at(args.output, lines)
    if done:
        print(f"fovea: {done} of {len(lines)} lines are answered already", file=sys.stderr)
    if done < len(lines):
        with load_engine(args, file, **SINGLE_USER) as engine:
            runner = _LineRunner(engine, args.input.parent, params, pixel_budget(args))
            work = _answer_all(runner, args.output, lines, done, args.concurrency)
            failed += asyncio.run(run_and_close(engine, work))
    if failed:
        print(
            f"fovea: {failed} of {len(lines)} lines could not be answered; see their error in {args.output}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _lines(path: Path) -> list[bytes]:
    """Return the lines of IN as bytes, so that a line that is not text does not stop the others.

    Only a line feed ends a line, because JSON strings may contain U+2028 and similar characters.
    Raises InvalidRequest if IN cannot be read.
    """
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
    return [*lines, last] if last.strip() else lines


def _check_output(source: Path, output: Path) -> None:
    """Check OUT before a model is loaded. Raises InvalidRequest."""
    if output.exists() and source.samefile(output):
        raise InvalidRequest("IN and OUT are the same file")
    try:
        output.open("ab").close()
    except OSError as error:
        raise InvalidRequest(f"{output} cannot be written: {error.strerror}") from error


def resume_at(output: Path, lines: Sequence[bytes]) -> tuple[int, int]:
    """Return the number of whole lines in OUT, and how many of them are errors.

    A last line that a crash cut off is removed. Raises InvalidRequest if OUT does not answer these lines;
    then OUT stays as it is.
    """
    *whole, rest = output.read_bytes().split(b"\n")
    if len(whole) > len(lines):
        raise InvalidRequest(f"{output} has {len(whole)} lines, IN only {len(lines)}: not its output")
    bodies = [_check_answers(output, n, *pair) for n, pair in enumerate(zip(whole, lines, strict=False), 1)]
    if rest:
        begins = f'{{"line": {len(whole) + 1},'.encode()
        if len(whole) == len(lines) or not (rest.startswith(begins) or begins.startswith(rest)):
            raise InvalidRequest(f"{output}:{len(whole) + 1} is no answer to IN: not its output")
        with output.open("r+b") as file:
            file.truncate(output.stat().st_size - len(rest))
    return len(whole), sum("error" in body for body in bodies)


def _check_answers(output: Path, number: int, answer: bytes, line: bytes) -> dict[str, Any]:
    """Return a line of OUT as an object. Raises InvalidRequest unless number and id match the line of IN."""
    try:
        name = _object(line).get("id", number)
    except InvalidRequest:
        name = number
    try:
        body = json.loads(answer.decode())
    except (ValueError, RecursionError):
        body = None
    same = isinstance(body, dict) and body.get("line") == number
    if not same or json.dumps(body.get("id")) != json.dumps(name):
        raise InvalidRequest(f"{output}:{number} does not answer line {number} of IN: not its output")
    return dict(body)


async def _answer_all(
    runner: _LineRunner, output: Path, lines: list[bytes], done: int, concurrency: int
) -> int:
    """Keep `concurrency` questions in flight, and write the answers in the order of the questions.

    Returns the number of errors.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    failed = 0
    with (
        # A JSON string may contain a lone surrogate. It is written as its JSON escape.
        output.open("a", encoding="utf-8", errors="backslashreplace") as out,
        Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress,
    ):
        bar = progress.add_task("answering", total=len(lines), completed=done)
        numbered = enumerate(lines[done:], done + 1)
        window = [
            asyncio.create_task(runner.answer(*pair)) for pair in itertools.islice(numbered, concurrency)
        ]
        while window:
            body = await window.pop(0)
            window += [asyncio.create_task(runner.answer(*pair)) for pair in itertools.islice(numbered, 1)]
            failed += "error" in body
            out.write(json.dumps(body, ensure_ascii=False) + "\n")
            out.flush()
            progress.advance(bar)
    return failed


class _LineRunner:
    """Turns a line of IN into a line of OUT.

    folder: the folder to which paths are relative.
    params: sampling parameters of the flags.
    budget: image budget of the flags.
    """

    def __init__(self, engine: Any, folder: Path, params: dict[str, Any], budget: PixelBudget) -> None:
        self._engine = engine
        self._folder = folder
        self._params = params
        self._budget = budget

    async def answer(self, number: int, line: bytes) -> dict[str, Any]:
        """Return the answer to a line, or its error. An error of one line does not stop the others."""
        head: dict[str, Any] = {"line": number, "id": number}
        try:
            value = _object(line)
            head["id"] = value.get("id", number)
            _check(value)
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
        params = {**self._params, **_params(value.get("params", {}))}
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


def _object(line: bytes) -> dict[str, Any]:
    if not line.strip():
        raise InvalidRequest("the line is empty")
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("not a JSON object")
    return value


def _check(value: dict[str, Any]) -> None:
    """Raise InvalidRequest unless the fields are known, compatible and of the right types."""
    unknown = sorted(set(value) - set(FIELDS))
    if unknown:
        raise InvalidRequest(f"unknown field {unknown[0]!r}; known: {', '.join(FIELDS)}", param=unknown[0])
    for one, other in (
        ("question", "messages"),
        ("image", "images"),
        ("image", "messages"),
        ("images", "messages"),
    ):
        if one in value and other in value:
            raise InvalidRequest(f"either {one} or {other}, not both", param=one)
    if "question" not in value and not value.get("messages"):
        raise InvalidRequest("question or messages is required")
    for name, kind, words in TYPES:
        if name in value and not isinstance(value[name], kind):
            raise InvalidRequest(f"{name} takes {words}", param=name)


def _params(params: dict[str, Any]) -> dict[str, Any]:
    """Convert sampling parameters from JSON to the types of SamplingParams. Raises InvalidRequest."""
    values = dict(params)
    for name, kind in (("stop", str), ("stop_token_ids", int)):
        if name in values:
            entries = [values[name]] if isinstance(values[name], kind) else values[name]
            if not isinstance(entries, list) or not all(isinstance(entry, kind) for entry in entries):
                raise InvalidRequest(f"{name} takes a list of {kind.__name__}", param=name)
            values[name] = tuple(entries)
    if "logit_bias" in values:
        try:
            values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
        except (AttributeError, ValueError) as error:
            raise InvalidRequest("logit_bias takes an object of token ids", param="logit_bias") from error
    return values
