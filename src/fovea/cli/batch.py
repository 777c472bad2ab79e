"""fovea batch IN OUT.jsonl: many questions, resumable, in order.

IN is a file of questions, or a folder of images with --prompt. A line of the
file is {"image": "a.png", "question": "..."}. `images` takes several,
`params` sampling parameters, `id` a name. `messages`, instead of a question,
takes a whole conversation whose parts are {"type": "text", "text": "..."} and
{"type": "image", "image": "a.png"}. Paths are relative to the folder of IN.

Line n of OUT answers line n of IN: {"line", "id", "text", "finish_reason",
"usage"}, or {"line", "id", "error"}; with params.n there are "texts" and
"finish_reasons". A second run asks again what failed, and continues after the
last whole line of OUT.

Exit codes: 0 every line is answered, 1 some are errors, 2 the command line or a
file is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fovea.api.answer_format import FormatFields, answer_format
from fovea.api.convert import usage_body
from fovea.api.errors import error_body
from fovea.api.explain import explained, fields_of
from fovea.api.unknown import ignored_fields
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
    utf8,
)
from fovea.core.errors import FoveaError, InvalidRequest
from fovea.core.json_text import is_blank, one_line, parse_object
from fovea.core.media import PixelBudget
from fovea.core.types import AnswerBuilder

FIELDS = ("id", "image", "images", "question", "messages", "params")
TYPES: tuple[tuple[str, type, str], ...] = (
    ("image", str, "a path"),
    ("images", list, "a list of paths"),
    ("question", str, "text"),
    ("messages", list, "a list of messages"),
    ("params", dict, "an object of sampling parameters"),
)
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
"""Endings of the names of images in a folder."""


def read_questions(path: Path) -> list[bytes]:
    """Return the lines of IN, a file or a folder. Raises InvalidRequest if it cannot be read."""
    return _folder_lines(path) if path.is_dir() else _file_lines(path)


def _folder_lines(folder: Path) -> list[bytes]:
    """Return a line for each image in a folder and the folders in it, in the order of their names.

    Hidden files are left out. Raises InvalidRequest if there is no image.
    """
    names = sorted(
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGES and path.is_file() and not _is_hidden(path.relative_to(folder))
    )
    if not names:
        raise InvalidRequest(f"{folder} has no image; accepted are files that end in {', '.join(IMAGES)}")
    return [json.dumps({"id": name.as_posix(), "image": name.as_posix()}).encode() for name in names]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _file_lines(path: Path) -> list[bytes]:
    """Return the lines of IN as bytes, so that a line that is not text does not stop the others.

    Only a line feed ends a line, because JSON strings may contain U+2028 and similar characters. Blank lines
    are left out and not counted: editors and shells add them, above all at the end.
    Raises InvalidRequest if IN cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
    return [line for line in lines if not is_blank(line)]


def check_question(value: dict[str, Any]) -> None:
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


def sampling_params(params: dict[str, Any]) -> dict[str, Any]:
    """Convert sampling parameters from JSON to the types of SamplingParams. Raises InvalidRequest.

    The form of the answer has the names that it has over HTTP, such as response_format.
    """
    values = dict(params)
    fields = {name: values.pop(name) for name in FormatFields.model_fields if name in values}
    with explained():
        body = FormatFields.model_validate(fields, extra="allow")
        ignored_fields(body, fields_of(FormatFields), strict=True)
        form = answer_format(body)
    if fields:  # also if they ask for plain text, against the flags
        values["format"] = form
    for name, kind in (
        ("stop", str), ("bad_words", str), ("stop_token_ids", int), ("allowed_token_ids", int),
    ):  # fmt: skip
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


class Progress(NamedTuple):
    """The state of OUT.

    done: number of whole lines that are written, answers and errors.
    failed: numbers of those that are errors, from 1 on.
    """

    done: int
    failed: tuple[int, ...]


def write_body(body: Mapping[str, Any]) -> bytes:
    """A line of OUT. A JSON string may contain a lone surrogate, which is written as its JSON escape."""
    return one_line(json.dumps(body, ensure_ascii=False)).encode("utf-8", "backslashreplace") + b"\n"


def replace_lines(output: Path, bodies: Mapping[int, Mapping[str, Any]]) -> None:
    """Replace lines of OUT by others, all at once. bodies: by number of the line, from 1 on."""
    lines = output.read_bytes().split(b"\n")[:-1]
    for number, body in bodies.items():
        lines[number - 1] = write_body(body)[:-1]
    output = output.resolve()  # a link stays one
    aside = output.with_name(f".{output.name}.new")
    aside.write_bytes(b"".join(line + b"\n" for line in lines))
    shutil.copymode(output, aside)
    os.replace(aside, output)


def check_output(source: Path, output: Path) -> None:
    """Check OUT before a model is loaded. Raises InvalidRequest."""
    if output.exists() and source.samefile(output):
        raise InvalidRequest("IN and OUT are the same file")
    try:
        output.open("ab").close()
    except OSError as error:
        raise InvalidRequest(f"{output} cannot be written: {error.strerror}") from error


def resume_at(output: Path, lines: Sequence[bytes]) -> Progress:
    """Return how many lines of IN have a line in OUT, and which of these are errors.

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
            raise InvalidRequest(f"{output}:{len(whole) + 1} is not an answer to IN: not its output")
        with output.open("r+b") as file:
            file.truncate(output.stat().st_size - len(rest))
    return Progress(len(whole), tuple(n for n, body in enumerate(bodies, 1) if "error" in body))


def _check_answers(output: Path, number: int, answer: bytes, line: bytes) -> dict[str, Any]:
    """Return a line of OUT as an object. Raises InvalidRequest unless number and id match the line of IN."""
    try:
        name = parse_object(line).get("id", number)
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
            raise InvalidRequest(
                f"an image is {name!r}; accepted: the path of a file, as a string", param="image"
            )
        return self._folder / name


def register(commands: Any) -> None:
    parser = commands.add_parser("batch", description=__doc__, usage="fovea batch [OPTIONS] IN OUT.jsonl")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "input", type=Path, metavar="IN", help="questions, one JSON object per line; or a folder of images"
    )
    parser.add_argument(
        "output", type=Path, metavar="OUT.jsonl", help="answers; the file is created, or continued"
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="the question for each image of a folder, and for lines without one"
    )
    parser.add_argument(
        "--concurrency", type=count, default=16, metavar="N", help="questions in flight (default: 16)"
    )
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    file, params = config_file(args), sampling_values(args)
    if args.prompt is None and args.input.is_dir():
        raise InvalidRequest(f"{args.input} is a folder: --prompt has to say what is asked", param="prompt")
    prompt = None if args.prompt is None else utf8(args.prompt)
    lines = read_questions(args.input)
    check_output(args.input, args.output)
    progress = resume_at(args.output, lines)
    _report(progress, len(lines))
    failed = len(progress.failed)
    if progress.failed or progress.done < len(lines):
        with load_engine(args, file, **SINGLE_USER) as engine:
            folder = args.input if args.input.is_dir() else args.input.parent
            runner = LineRunner(engine, folder, params, pixel_budget(args), prompt)
            work = _answer_all(runner, args.output, lines, progress, args.concurrency)
            failed = asyncio.run(run_and_close(engine, work))
    if failed:
        print(
            f"fovea: {failed} of {len(lines)} lines could not be answered; see their error in {args.output}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _report(progress: Progress, total: int) -> None:
    """Tell what an earlier run has done."""
    if progress.done:
        failed = len(progress.failed)
        again = f"; asking again what failed: {failed}" if failed else ""
        print(
            f"fovea: {progress.done - failed} of {total} lines are answered already{again}", file=sys.stderr
        )


async def _answer_all(
    runner: LineRunner, output: Path, lines: list[bytes], progress: Progress, concurrency: int
) -> int:
    """Ask the failed lines again, then the others, and write their answers. Returns the number of errors.

    The new answers to failed lines replace the errors in OUT when all of them are known. The other answers
    are appended one by one.
    """
    total, done = len(lines), progress.done - len(progress.failed)
    again = [(number, lines[number - 1]) for number in progress.failed]
    bodies = [body async for body in answers(runner, again, concurrency, total=total, done=done)]
    if bodies:
        replace_lines(output, {body["line"]: body for body in bodies})
    failed = sum("error" in body for body in bodies)
    rest = enumerate(lines[progress.done :], progress.done + 1)
    with output.open("ab") as out:
        async for body in answers(runner, rest, concurrency, total=total, done=progress.done):
            failed += "error" in body
            out.write(write_body(body))
            out.flush()
    return failed
