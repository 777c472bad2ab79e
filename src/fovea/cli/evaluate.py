"""fovea eval [MODEL]: the accuracy of a model, per kind of question, or its perplexity on a text."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fovea.cli import options
from fovea.cli.common import (
    SINGLE_USER,
    add_engine_options,
    add_image_options,
    add_reduction_options,
    config_file,
    count,
    load_engine,
    pixel_budget,
    run_and_close,
    visual_tokens,
)
from fovea.cli.questions import CaseRunner, check_data, check_images, progress, requested_kinds
from fovea.cli.sweep import add_sweep_options, check_no_sweep
from fovea.cli.sweep import run as run_sweep
from fovea.core.errors import InvalidRequest
from fovea.core.markdown import markdown_table
from fovea.core.media import PixelBudget, VisualTokens
from fovea.core.types import AnswerBuilder, PromptLogprobs, TokenPrompt
from fovea.evaluation.datasets import MOTION, Case, read_jsonl, scene_cases
from fovea.evaluation.perplexity import Perplexity, pieces
from fovea.evaluation.scenes import DETAIL_KINDS, HELD_OUT_SEED, KINDS, TASK_KINDS
from fovea.evaluation.score import Result, Row, report

if TYPE_CHECKING:
    from fovea import Engine

MAX_ANSWER = 96
WINDOW = 1024
"""Tokens of a piece of a text, if --window is not given."""


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        description=f"{__doc__} Without --data the questions are about generated scenes, whose right answers "
        "are known. Exit code 1: some cases could not be asked; they count as wrong.",
        usage="fovea eval [OPTIONS] [MODEL]",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder, a hub id, or fovea-tiny (default)"
    )
    _add_questions(parser.add_argument_group("questions"))
    add_image_options(parser.add_argument_group("images"))
    add_reduction_options(parser)
    add_sweep_options(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    form.add_argument("--markdown", action="store_true", help="a Markdown table, for model cards")
    parser.add_argument("--wrong", action="store_true", help="print every wrong answer to stderr")
    add_engine_options(parser, model_flag=False)
    parser.set_defaults(run=run)


def _add_questions(group: argparse._ArgumentGroup) -> None:
    """Add the flags that say what is asked, and how much at once."""
    group.add_argument(
        "--data", type=Path, metavar="FILE.jsonl", help="your own images, questions and answers"
    )
    group.add_argument(
        "--perplexity", type=Path, metavar="FILE.txt", help="print the perplexity on a text instead"
    )
    group.add_argument(
        "--window",
        type=count,
        default=None,
        metavar="N",
        help=f"with --perplexity: tokens of the pieces into which the text is cut (default: {WINDOW}, or the "
        "model's context)",
    )
    group.add_argument(
        "--count", type=count, default=50, metavar="N", help="generated scenes per kind (default: 50)"
    )
    kinds = group.add_argument(
        "--kinds",
        metavar="A,B",
        help=f"kinds of scenes: {', '.join(KINDS)} (default: all of these), {', '.join(DETAIL_KINDS)} "
        f"in large images (with --sweep by default, too), and {', '.join(TASK_KINDS)}: tools to call, and "
        "JSON of a given schema",
    )
    options.accepts(kinds, (*KINDS, *DETAIL_KINDS, *TASK_KINDS))
    group.add_argument(
        "--seed",
        type=int,
        default=HELD_OUT_SEED,
        metavar="N",
        help="seed of the scenes; seeds from 1000000000 on are held out from training (default: 1000000000)",
    )
    group.add_argument(
        "--video",
        action="store_true",
        help=f"show the frames of {MOTION} as a video instead of separate images",
    )
    group.add_argument(
        "--concurrency", type=count, default=8, metavar="N", help="questions in flight (default: 8)"
    )
    group.add_argument(
        "--max-tokens",
        type=count,
        default=MAX_ANSWER,
        metavar="N",
        help=f"longest answer (default: {MAX_ANSWER})",
    )


def run(args: argparse.Namespace) -> int:
    if args.sweep:
        return run_sweep(args)
    check_no_sweep(args)
    if args.perplexity is not None:
        return run_perplexity(args)
    if args.window is not None:
        raise InvalidRequest("--window is for --perplexity", param="window")
    file, budget = config_file(args), pixel_budget(args, visual_tokens(args))
    cases = _cases(args)
    with load_engine(args, file, **SINGLE_USER) as engine:
        check_images(engine.info, cases)
        runner = CaseRunner(engine, args.max_tokens)
        name = engine.info.name
        results = asyncio.run(run_and_close(engine, _run_all(runner, cases, budget, args.concurrency)))
    runner.show_failures()
    if args.wrong:
        _show_wrong(results)
    rows = report(results)
    if args.json:
        body = [{**asdict(row), "accuracy": row.accuracy} for row in rows]
        print(
            json.dumps(
                {
                    "model": name,
                    "seed": None if args.data else args.seed,
                    "failed": len(runner.failures),
                    "visual_tokens": None if budget.visual is None else _wish(budget.visual),
                    "rows": body,
                }
            )
        )
    elif args.markdown:
        print(markdown(rows))
    else:
        _table(rows)
    return 1 if runner.failures else 0


def run_perplexity(args: argparse.Namespace) -> int:
    """Print the perplexity of a model on a text."""
    for name in ("data", "kinds", "video", "wrong"):
        if getattr(args, name):
            raise InvalidRequest(f"--{name} is for questions, not for --perplexity", param=name)
    file, text = config_file(args), _read_text(args.perplexity)
    with load_engine(args, file, **SINGLE_USER) as engine:
        window = args.window or min(WINDOW, engine.info.max_context - 1)
        if not 2 <= window < engine.info.max_context:
            raise InvalidRequest(
                f"--window is {window}; accepted: 2 to {engine.info.max_context - 1}, which is the model's "
                "context without the token that follows a piece",
                param="window",
            )
        ids, start = engine.tokenizer.encode_plain(text), engine.tokenizer.start_ids
        parts = [TokenPrompt(piece) for piece in pieces(ids, start, window)]
        if not parts:
            raise InvalidRequest(
                f"{args.perplexity} has {len(ids)} tokens, of which none can be predicted", param="perplexity"
            )
        info = engine.info
        scored = asyncio.run(run_and_close(engine, _score_all(engine, parts, args.concurrency)))
    found = Perplexity.of(scored, len(text.encode()))
    facts = {
        "model": info.name, "text": str(args.perplexity), "window": window, "tokens": found.tokens,
        "dtype": info.dtype, "quantization": info.quantization, "kv_dtype": info.kv_dtype,
        "perplexity": found.perplexity, "nats_per_token": found.nats / found.tokens,
        "bits_per_byte": found.bits_per_byte,
    }  # fmt: skip
    if args.json:
        print(json.dumps(facts))
    elif args.markdown:
        print(markdown_table(tuple(facts), [[_rounded(value) for value in facts.values()]]))
    else:
        for name, value in facts.items():
            print(f"{name.replace('_', ' '):16}{_rounded(value)}")
    return 0


def _rounded(value: str | int | float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", param="perplexity") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8 (byte {error.start})", param="perplexity") from error


async def _score_all(
    engine: Engine, prompts: Sequence[TokenPrompt], concurrency: int
) -> list[PromptLogprobs]:
    """Return the log-probabilities of the tokens of every prompt, in order. Raises FoveaError."""
    slots = asyncio.Semaphore(concurrency)
    with progress("scoring", len(prompts)) as advance:

        async def score(prompt: TokenPrompt) -> PromptLogprobs:
            async with slots:
                answer = AnswerBuilder(1)
                async for delta in engine.stream(prompt, max_tokens=1, temperature=0.0, prompt_logprobs=0):
                    answer.add(delta)
            advance()
            return answer.build().prompt_logprobs

        return list(await asyncio.gather(*map(score, prompts)))


def _wish(visual: VisualTokens) -> dict[str, Any]:
    return {"method": visual.method, "keep": visual.keep, "budget": visual.budget}


def _cases(args: argparse.Namespace) -> list[Case]:
    if args.data:
        check_data(args)
        return read_jsonl(args.data)
    return list(scene_cases(args.count, requested_kinds(args, KINDS), args.seed, args.video))


async def _run_all(
    runner: CaseRunner, cases: Sequence[Case], budget: PixelBudget, concurrency: int
) -> list[Result]:
    slots = asyncio.Semaphore(concurrency)
    with progress("asking", len(cases)) as advance:

        async def run_one(case: Case) -> Result:
            async with slots:
                visual = await runner.visual(case)
                if visual is None:
                    result = Result(case, (), 0, 0, 0)
                else:
                    result = await runner.run(case, visual, budget)
            advance()
            return result

        return list(await asyncio.gather(*(run_one(case) for case in cases)))


def _show_wrong(results: Sequence[Result]) -> None:
    for result in results:
        if not result.correct:
            for exchange, answer in zip(result.case.exchanges, result.answers, strict=False):
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
    """Return the scores as a Markdown table."""
    return markdown_table(
        ("kind", "right", "accuracy", "95% interval", "visual tokens"),
        (
            (row.kind, f"{row.correct}/{row.cases}", f"{row.accuracy:.1%}", f"{row.low:.1%} - {row.high:.1%}",
             f"{row.image_tokens:.0f}")
            for row in rows
        ),
    )  # fmt: skip
