"""fovea batch IN OUT.jsonl: many questions, resumable, in order.

IN is a file of questions, or a folder of images and PDF files with --prompt. A
line of the file is {"image": "a.png", "question": "..."}. `images` takes several,
`params` sampling parameters, `id` a name. `messages`, instead of a question,
takes a whole conversation whose parts are {"type": "text", "text": "..."} and
{"type": "image", "image": "a.png"}. Paths are relative to the folder of IN.
An image can be a page of a PDF file, "a.pdf#page=2" (extra `pdf`).

Line n of OUT answers line n of IN: {"line", "id", "text", "finish_reason",
"usage"}, or {"line", "id", "error"}; with params.n there are "texts" and
"finish_reasons". A second run asks again what failed, and continues after the
last whole line of OUT.

With --cluster, a Ray cluster answers, IN and OUT may be in an object store, and
OUT is a folder of files of answers.

Exit codes: 0 every line is answered, 1 some are errors, 2 the command line or a
file is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fovea.api.questions import IMAGES, LineRunner, write_body
from fovea.cli.batch_cluster import add_cluster_options, check_without, run_cluster
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
from fovea.cli.text import HelpFormatter
from fovea.core.errors import InvalidRequest
from fovea.core.json_text import is_blank, parse_object
from fovea.media.pdf import Document, InvalidPdf, PageRange

IN_FLIGHT = 16
PDF = ".pdf"
_PAGE = re.compile(r"(?P<path>.+)#page=(?P<page>[1-9]\d{0,5})")


def read_questions(path: Path) -> list[bytes]:
    """Return the lines of IN, a file or a folder. Raises InvalidRequest if it cannot be read."""
    return _folder_lines(path) if path.is_dir() else _file_lines(path)


def _folder_lines(folder: Path) -> list[bytes]:
    """Return a line for each image and each page of a PDF file in a folder and the folders in it, by name.

    Hidden files are left out. Raises InvalidRequest if there is no image, and Unavailable if there is a PDF
    file and the package that reads them is missing.
    """
    names = sorted(
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.suffix.lower() in (*IMAGES, PDF)
        and path.is_file()
        and not _is_hidden(path.relative_to(folder))
    )
    if not names:
        accepted = ", ".join((*IMAGES, PDF))
        raise InvalidRequest(f"{folder} has no image; accepted are files that end in {accepted}")
    lines = [line for name in names for line in _names_in(folder, name)]
    return [json.dumps({"id": name, "image": name}).encode() for name in lines]


def _names_in(folder: Path, name: Path) -> list[str]:
    """Return the name of an image, or the names of the pages of a PDF file.

    A PDF file that cannot be read gets one page, whose answer will be the error.
    """
    if name.suffix.lower() != PDF:
        return [name.as_posix()]
    try:
        with Document((folder / name).read_bytes()) as document:
            pages = document.pages
    except (InvalidPdf, OSError):
        pages = 1
    return [f"{name.as_posix()}#page={page}" for page in range(1, pages + 1)]


class ImageFolder:
    """Opens images by their names: files, and pages of PDF files as `a.pdf#page=2`. Threads may share it.

    folder: names are relative to it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._alone = threading.Lock()  # PDFium works for one thread at a time

    def open(self, name: str) -> Path | bytes:
        """Return the path of an image, or a page as a JPEG file.

        Raises InvalidPdf for a file or page that cannot be read, Unavailable if pypdfium2 is missing.
        """
        found = _PAGE.fullmatch(name)
        if found is None or not found["path"].lower().endswith(PDF):
            if name.lower().endswith(PDF):
                raise InvalidPdf(f"{name} is a PDF file; accepted: one of its pages, such as {name}#page=1")
            return self._folder / name
        try:
            data = (self._folder / found["path"]).read_bytes()
        except OSError as error:
            raise InvalidPdf(f"{found['path']} cannot be read: {error.strerror}") from error
        number = int(found["page"])
        with self._alone, Document(data) as document:
            (page,) = document.render(PageRange(number, number, most=1))
        return page.jpeg


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


class Progress(NamedTuple):
    """The state of OUT.

    done: number of whole lines that are written, answers and errors.
    failed: numbers of those that are errors, from 1 on.
    """

    done: int
    failed: tuple[int, ...]


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


def register(commands: Any) -> None:
    parser = commands.add_parser("batch", description=__doc__, usage="fovea batch [OPTIONS] IN OUT.jsonl")
    parser.formatter_class = HelpFormatter
    parser.add_argument(
        "input", metavar="IN", help="questions, one JSON object per line; or a folder of images and PDF files"
    )
    parser.add_argument("output", metavar="OUT.jsonl", help="answers; the file is created, or continued")
    parser.add_argument(
        "--prompt", metavar="TEXT", help="the question for each image of a folder, and for lines without one"
    )
    parser.add_argument(
        "--concurrency",
        type=count,
        metavar="N",
        help="questions in flight (default: 16; with --cluster, 64 of each worker)",
    )
    add_cluster_options(parser)
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.cluster is not None:
        return run_cluster(args)
    check_without(args)
    file, params, source, output = (
        config_file(args),
        sampling_values(args),
        Path(args.input),
        Path(args.output),
    )
    if args.prompt is None and source.is_dir():
        raise InvalidRequest(f"{source} is a folder: --prompt has to say what is asked", param="prompt")
    prompt = None if args.prompt is None else utf8(args.prompt)
    lines = read_questions(source)
    check_output(source, output)
    progress = resume_at(output, lines)
    _report(progress, len(lines))
    failed = len(progress.failed)
    if progress.failed or progress.done < len(lines):
        with load_engine(args, file, **SINGLE_USER) as engine:
            folder = source if source.is_dir() else source.parent
            runner = LineRunner(engine, ImageFolder(folder).open, params, pixel_budget(args), prompt)
            work = _answer_all(runner, output, lines, progress, args.concurrency or IN_FLIGHT)
            failed = asyncio.run(run_and_close(engine, work))
    if failed:
        print(
            f"fovea: {failed} of {len(lines)} lines could not be answered; see their error in {output}",
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
