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
import sys
from pathlib import Path
from typing import Any

from fovea.cli.batch.answers import Progress, check_output, replace_lines, resume_at, write_body
from fovea.cli.batch.ask import LineRunner, answers
from fovea.cli.batch.questions import read_questions
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
from fovea.core.errors import InvalidRequest


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "batch",
        description=__doc__,
        usage="fovea batch [OPTIONS] IN OUT.jsonl",
    )
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
