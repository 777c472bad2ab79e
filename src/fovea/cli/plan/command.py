"""fovea plan: which hardware a model needs for a workload, how fast it will be, and what it costs.

Nothing is loaded: the figures follow from the shapes of model and hardware. Give
a workload as a file (--workload, see docs/planner.md) or by flags for one kind of
request.

  fovea plan Qwen/Qwen3-VL-8B-Instruct --image 1024x768 --rate 4
  fovea plan Qwen/Qwen3.5-9B --workload shop.toml --hardware L4 --hardware H100-SXM
  fovea plan ./my-checkpoint --hardware this --ttft-ms 2000 --itl-ms 80
  fovea plan Qwen/Qwen3-VL-8B-Instruct --workload shop.toml --emit plan/
  fovea plan --check fovea-tiny

--check measures instead: it fits the model of costs to two workloads on this
machine, predicts five others, plays them, and prints both.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fovea.cli.plan.make import make_plan
from fovea.cli.plan.model import find_model
from fovea.cli.plan.result import Plan, as_dict
from fovea.cli.plan.tables import show
from fovea.core.errors import ConfigError
from fovea.planner.hardware import Hardware, find
from fovea.planner.hardware_file import known_hardware, read_hardware
from fovea.planner.known import known_models
from fovea.planner.precision import RECIPES
from fovea.planner.recommend import PRECISIONS
from fovea.planner.workload import Kind, Video, Workload, read_workload

THIS = "this"
SIZE = "WxH"


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict memory, speed and cost, and recommend hardware",
        description=__doc__,
        usage="fovea plan MODEL [--workload FILE | REQUEST] [--hardware NAME ...] [OPTIONS]",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
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
    group.add_argument("--rate", type=float, metavar="X", help="conversations per second (default: 1)")
    group.add_argument(
        "--image",
        action="append",
        metavar=SIZE,
        dest="images",
        help="size of an image; several times for more",
    )
    group.add_argument("--video", metavar=f"N:{SIZE}", help="number of frames of a video, and their size")
    group.add_argument("--text", type=int, metavar="N", help="tokens of the question (default: 60)")
    group.add_argument("--answer", type=int, metavar="N", help="tokens of the answer (default: 120)")
    group.add_argument("--system", type=int, metavar="N", help="tokens that all prompts begin with")
    group.add_argument(
        "--follow-ups", type=float, metavar="X", help="further questions per conversation (default: 0)"
    )
    group.add_argument(
        "--seen", type=float, metavar="X", help="share of images whose encoding is cached, 0 to 1"
    )
    group.add_argument(
        "--json-share", type=float, metavar="X", help="share of the answers with a JSON schema, 0 to 1"
    )
    group.add_argument(
        "--keep", type=float, metavar="X", help="share of the visual tokens that are kept, 0.01 to 1"
    )
    group.add_argument(
        "--method", metavar="NAME", help="method that leaves out the others (default: relevance)"
    )
    group.add_argument(
        "--ttft-ms", type=float, metavar="X", help="longest time to the first token; 0: no target"
    )
    group.add_argument("--itl-ms", type=float, metavar="X", help="longest time between tokens; 0: no target")
    group.add_argument(
        "--percentile", type=float, metavar="X", help="percentage of requests that keep the targets (95)"
    )
    group.add_argument(
        "--visual-tokens",
        type=int,
        default=0,
        metavar="N",
        help="tokens of every image; 0: by the model's rule",
    )


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
    if args.models:
        print("\n".join(known_models()))
        return 0
    if args.list_hardware:
        print("\n".join(device.name for device in known_hardware()))
        return 0
    if args.model is None:
        raise ConfigError("which model? `fovea plan --models` lists the known ones", param="model")
    if args.check:
        from fovea.cli.plan.check import run_check

        return run_check(args.model, args.repeats, args.threads, args.save_cost, as_json=args.json)
    model = find_model(args.model, args.visual_tokens)
    plan = make_plan(
        model,
        workload_of(args),
        hardware_of(args),
        precisions=tuple(args.quantization or PRECISIONS),
        devices=_counts(args.devices),
        simulate=not args.no_simulation,
        compare_engines=not args.no_advice,
    )
    if args.emit is not None:
        _emit(args.emit, plan)
    if args.plot is not None:
        from fovea.cli.plan.plot import draw

        draw(args.plot, plan)
    if args.json:
        print(json.dumps(as_dict(plan)))
    else:
        show(plan, Console(file=sys.stdout, highlight=False))
    return 0 if plan.recommendation.best else 1


def workload_of(args: argparse.Namespace) -> Workload:
    """Return the workload of the flags, or of the file. Raises ConfigError if both describe requests."""
    flags = {
        "images": tuple(_size(text) for text in args.images or ()),
        "video": None if args.video is None else _video(args.video),
        "text": args.text, "answer": args.answer, "follow_ups": args.follow_ups, "seen": args.seen,
        "json": args.json_share,
    }  # fmt: skip
    request = {name: value for name, value in flags.items() if value not in (None, ())}
    outer = {
        "rate": args.rate, "system": args.system, "keep": args.keep, "method": args.method,
        "ttft_ms": args.ttft_ms, "itl_ms": args.itl_ms, "percentile": args.percentile,
    }  # fmt: skip
    given = {name: value for name, value in outer.items() if value is not None}
    if args.workload is None:
        return Workload((Kind("request", **request),), **given)
    if request:
        raise ConfigError(
            f"--workload describes the requests already; not accepted beside it: {', '.join(request)}",
            param="workload",
        )
    return replace(read_workload(args.workload), **given)


def hardware_of(args: argparse.Namespace) -> list[Hardware]:
    """Return the devices to choose from. `this` machine is measured."""
    known = list(known_hardware())
    own = list(read_hardware(args.hardware_file)) if args.hardware_file else []
    if not args.hardware:
        return own or known
    found = []
    for name in args.hardware:
        if name == THIS:
            from fovea.cli.plan.machine import this_machine

            found.append(this_machine(args.threads))
        else:
            found.append(find(name, [*own, *known]))
    return found


def _emit(folder: Path, plan: Plan) -> None:
    from fovea.deploy.gpus import GPUS
    from fovea.planner.emit import deploy_toml, engine_toml

    best = plan.recommendation.best
    if best is None:
        raise ConfigError("there is no configuration to write: none meets the targets", param="emit")
    gpus = {device.name: gpu for device in known_hardware() for gpu in GPUS if _same(device, gpu)}
    files = {
        "engine.toml": engine_toml(best, plan.workload),
        "deploy.toml": deploy_toml(best, plan.workload, gpus),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            print(f"wrote {folder / name}", file=sys.stderr)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}", param="emit") from error


def _same(device: Hardware, gpu: str) -> bool:
    """Whether a GPU of deployment specs is this device."""
    try:
        return find(gpu, known_hardware()) is device
    except ConfigError:
        return False


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise ConfigError(
            f"--devices is {text!r}; accepted: numbers from 1 to 1024, such as 1,2,4", param="devices"
        )
    return tuple(sorted({int(part) for part in parts}))


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    if not (
        width.isdecimal() and height.isdecimal() and 1 <= int(width) <= 65536 and 1 <= int(height) <= 65536
    ):
        raise ConfigError(
            f"size {text!r}; accepted: width and height in pixels, such as 1024x768", param="image"
        )
    return int(width), int(height)


def _video(text: str) -> Video:
    frames, _, size = text.partition(":")
    if not frames.isdecimal() or not 1 <= int(frames) <= 100_000 or not size:
        raise ConfigError(
            f"--video is {text!r}; accepted: frames and size, such as 16:640x360", param="video"
        )
    return Video(int(frames), *_size(size))
