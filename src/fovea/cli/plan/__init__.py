"""fovea plan: predictions before anything is bought or loaded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fovea.cli import options
from fovea.cli.text import HelpFormatter
from fovea.planner.precision import RECIPES
from fovea.planner.workload import Kind, Workload

SIZE = "WxH"
REQUEST_FLAGS = ("text", "answer", "follow_ups", "seen")
"""Settings of a kind of request that are flags of their own name."""


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        description=__doc__,
        usage="fovea plan MODEL [--workload FILE | REQUEST] [OPTIONS]",
    )
    parser.formatter_class = HelpFormatter
    parser.add_argument("model", nargs="?", help="hub id of a known model, a folder, or fovea-tiny")
    parser.add_argument("--models", action="store_true", help="list the known models, and end")
    parser.add_argument("--list-hardware", action="store_true", help="list the known hardware, and end")
    _add_workload(parser)
    _add_hardware(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw memory, stages, throughput and cost")
    output.add_argument(
        "--emit", type=Path, metavar="DIR",
        help="write engine.toml for `fovea serve --config` and deploy.toml for `fovea deploy`",
    )  # fmt: skip
    output.add_argument("--no-simulation", action="store_true", help="do not play the load on the simulator")
    output.add_argument("--no-advice", action="store_true", help="do not compare engines")
    check = parser.add_argument_group("measuring")
    check.add_argument(
        "--check", action="store_true", help="predict workloads on this machine, measure them, and compare"
    )
    check.add_argument("--repeats", type=int, default=3, metavar="N", help="runs per workload (default: 3)")
    check.add_argument("--threads", type=int, default=0, metavar="N", help="threads of the engine (0: cores)")
    check.add_argument(
        "--save-cost",
        type=Path,
        metavar="FILE",
        help="write the fitted cost model, for `fovea simulate --cost`",
    )
    parser.set_defaults(run=run)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload (a file, or one kind of request)")
    group.add_argument("--workload", type=Path, metavar="FILE", help="kinds of requests, rate and targets")
    options.add_options(parser, "workload:", Workload)
    group = parser.add_argument_group("request")
    group.add_argument(
        "--image", action="append", metavar=SIZE, dest="images",
        help="size of an image; several times for more",
    )  # fmt: skip
    group.add_argument("--video", metavar=f"N:{SIZE}", help="number of frames of a video, and their size")
    group.add_argument(
        "--json-share", type=float, metavar="X", help="share of the answers with a JSON schema, 0 to 1"
    )
    group.add_argument(
        "--visual-tokens", type=int, default=0, metavar="N",
        help="tokens of every image; 0: by the model's rule",
    )  # fmt: skip
    options.add_options(parser, "request:", Kind, only=REQUEST_FLAGS)


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hardware")
    group.add_argument(
        "--hardware", action="append", metavar="NAME",
        help="a device to choose from, or `this` machine, measured; several times (default: all known)",
    )  # fmt: skip
    group.add_argument("--hardware-file", type=Path, metavar="FILE", help="your own devices, as TOML")
    group.add_argument(
        "--quantization", action="append", metavar="NAME",
        help=f"{', '.join(RECIPES)}, or formats of parts: decoder=int4,encoder=int8,kv=fp8; several times",
    )  # fmt: skip
    group.add_argument(
        "--devices", default="1,2,4,8", metavar="N,N", help="devices of one replica to try (default: 1,2,4,8)"
    )


def run(args: argparse.Namespace) -> int:
    # Every command of fovea imports this file. What a plan needs is imported when one is made.
    from fovea.cli.plan.make import run_plan

    return run_plan(args)
