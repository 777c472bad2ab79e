"""Runs fovea plan: reads its flags, and prints or writes the plan."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fovea.cli.plan.machine import NAME, this_machine
from fovea.cli.plan.make import make_plan
from fovea.cli.plan.model import find_model
from fovea.cli.plan.result import Plan, as_dict
from fovea.cli.plan.tables import show
from fovea.core.errors import ConfigError
from fovea.planner.hardware import Hardware, find
from fovea.planner.hardware_file import known_hardware, read_hardware
from fovea.planner.known import known_models
from fovea.planner.recommend import PRECISIONS
from fovea.planner.workload import Kind, Video, Workload, read_workload


def run_plan(args: argparse.Namespace) -> int:
    """Run `fovea plan`. Returns 0 if a configuration meets the targets, else 1."""
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
    if args.plot is not None:
        from fovea.bench.plot import check_plot

        check_plot(args.plot)  # before seconds of work
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
        if name == NAME:
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
