"""fovea ask IMAGE... "question": one answer, streamed."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from fovea.cli.common import (
    add_engine_options,
    add_sampling_options,
    config_file,
    load_engine,
    pixel_budget,
    sampling_values,
)
from fovea.cli.show import stats_table
from fovea.core.answer import AnswerBuilder


def register(commands: Any) -> None:
    parser = commands.add_parser("ask", help="ask one question about images", description=__doc__)
    parser.add_argument(
        "images", nargs="*", metavar="IMAGE", help="picture files, in the order of the question"
    )
    parser.add_argument("question", help="the question; the last argument")
    parser.add_argument(
        "--stats", action="store_true", help="print milliseconds per stage and tokens afterwards"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the answer, usage and timings as one JSON object"
    )
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with load_engine(args, config_file(args)) as engine:
        request = engine.request(
            args.question, args.images, budget=pixel_budget(args), **sampling_values(args)
        )
        answer = AnswerBuilder(1)
        for delta in engine.iterate(request):
            answer.add(delta)
            if not args.json:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        done = answer.build()
    if args.json:
        from fovea.api.convert import timings_body, usage_body

        print(
            json.dumps(
                {
                    "text": done.text,
                    "finish_reason": done.finish_reasons[0],
                    "usage": usage_body(done.usage).model_dump(),
                    "timings_ms": timings_body(done.timings),
                },
                ensure_ascii=False,
            )
        )
        return 0
    print()
    if args.stats:
        stats_table(done)
    return 0
