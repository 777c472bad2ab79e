"""fovea eval [MODEL]: how well a model answers, per kind of question."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fovea.cli.common import add_engine_options, config_file, load_engine
from fovea.core.answer import AnswerBuilder
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.evaluation.datasets import Case, read_jsonl, scene_cases
from fovea.evaluation.scenes import HELD_OUT_SEED, KINDS
from fovea.evaluation.score import Result, Row, report

MAX_ANSWER = 96


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "eval", help="score a model on scenes or on your own questions", description=__doc__
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder, a hub id, or fovea-tiny (default)"
    )
    parser.add_argument(
        "--data", type=Path, metavar="FILE.jsonl", help="your own images, questions and answers"
    )
    parser.add_argument(
        "--count", type=int, default=50, metavar="N", help="generated scenes per kind (default: 50)"
    )
    parser.add_argument("--kinds", metavar="A,B", help=f"of {','.join(KINDS)} (default: all)")
    parser.add_argument(
        "--seed", type=int, default=HELD_OUT_SEED, help="of the scenes; held out from 1000000000 on"
    )
    parser.add_argument(
        "--concurrency", type=int, default=8, metavar="N", help="questions in flight (default: 8)"
    )
    parser.add_argument("--max-tokens", type=int, default=MAX_ANSWER, metavar="N", help="longest answer")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--markdown", action="store_true", help="a Markdown table, for model cards")
    parser.add_argument("--wrong", action="store_true", help="print every wrong answer to stderr")
    add_engine_options(parser, model_flag=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.data:
        cases = read_jsonl(args.data)
    else:
        kinds = tuple(args.kinds.split(",")) if args.kinds else KINDS
        cases = list(scene_cases(args.count, kinds, args.seed))
    with load_engine(args, config_file(args)) as engine:
        results = asyncio.run(_ask_all(engine, cases, args.concurrency, args.max_tokens))
        name = engine.info.name
    if args.wrong:
        _show_wrong(results)
    rows = report(results)
    if args.json:
        body = [{**asdict(row), "accuracy": row.accuracy} for row in rows]
        print(json.dumps({"model": name, "seed": None if args.data else args.seed, "rows": body}))
    elif args.markdown:
        print(markdown(rows))
    else:
        _table(rows)
    return 0


async def _ask_all(engine: Any, cases: Sequence[Case], concurrency: int, max_tokens: int) -> list[Result]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    slots = asyncio.Semaphore(max(1, concurrency))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("asking", total=len(cases))

        async def one(case: Case) -> Result:
            async with slots:
                result = await _ask(engine, case, max_tokens)
            progress.advance(bar)
            return result

        return list(await asyncio.gather(*(one(case) for case in cases)))


async def _ask(engine: Any, case: Case, max_tokens: int) -> Result:
    """Every exchange of a case as one conversation, greedy, on the model's own earlier answers."""
    from fovea.engine.inputs import to_image

    images = await asyncio.to_thread(lambda: [ImagePart(to_image(image)) for image in case.images])
    messages: list[Message] = []
    answers: list[str] = []
    prompt = image_tokens = completion = 0
    for index, exchange in enumerate(case.exchanges):
        shown = images if index == 0 else []
        messages.append(Message("user", (*shown, TextPart(exchange.question))))
        answer = AnswerBuilder(1)
        async for delta in engine.stream(ChatPrompt(tuple(messages)), temperature=0.0, max_tokens=max_tokens):
            answer.add(delta)
        done = answer.build()
        answers.append(done.text)
        messages.append(Message("assistant", (TextPart(done.text),)))
        prompt, image_tokens = prompt + done.usage.prompt, image_tokens + done.usage.image
        completion += done.usage.completion
    return Result(case, tuple(answers), prompt, image_tokens, completion)


def _show_wrong(results: Sequence[Result]) -> None:
    for result in results:
        if not result.correct:
            for exchange, answer in zip(result.case.exchanges, result.answers, strict=True):
                print(
                    f"{result.case.id}: {exchange.question!r} -> {answer!r}, not {exchange.accepted[0]!r}",
                    file=sys.stderr,
                )


def _table(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("kind", "right", "accuracy", "95% interval", "prompt", "visual", "answer", box=None)
    for row in rows:
        table.add_row(
            row.kind, f"{row.correct}/{row.cases}", f"{row.accuracy:.1%}", f"{row.low:.1%} - {row.high:.1%}",
            f"{row.prompt_tokens:.0f}", f"{row.image_tokens:.0f}", f"{row.completion_tokens:.0f}",
        )  # fmt: skip
    Console().print(table)


def markdown(rows: Sequence[Row]) -> str:
    lines = ["| kind | right | accuracy | 95% interval | visual tokens |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row.kind} | {row.correct}/{row.cases} | {row.accuracy:.1%} | {row.low:.1%} - {row.high:.1%} "
            f"| {row.image_tokens:.0f} |"
        )
    return "\n".join(lines)
