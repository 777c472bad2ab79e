"""Runs fovea plan: reads its flags, puts the plan together, and prints or writes it.

A plan is a search, a simulation, savings, divisions and advice.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fovea.cli import options
from fovea.cli.plan import REQUEST_FLAGS
from fovea.cli.plan.fleet import plan_fleet
from fovea.cli.plan.inputs import NAME, PlannedModel, find_model, this_machine
from fovea.cli.plan.result import Plan, as_dict, play_split, prompt_cost, simulate_option
from fovea.cli.plan.show import show
from fovea.core.config_files import check_keys, parse_toml
from fovea.core.errors import ConfigError
from fovea.engine.config import EngineConfig
from fovea.planner.advisor import Recommendation as Advice
from fovea.planner.advisor import Situation, advise
from fovea.planner.cost import Composition
from fovea.planner.hardware import Hardware, find, known_hardware, read_hardware
from fovea.planner.option import Option, evaluate, savings, speculation
from fovea.planner.parallel import Split, best_split, divisions
from fovea.planner.precision import RECIPES
from fovea.planner.recommend import PRECISIONS, recommend
from fovea.planner.roofline import Setup, reductions
from fovea.planner.shape import known_models
from fovea.planner.workload import BEFORE_ENCODER, Kind, Video, Workload, loss, read_workload

ACCEPTANCE = 0.6
"""Probability of a draft in the table of speculative decoding."""
DRAFTS = (1, 2, 3, 5, 8)


def make_plan(
    model: PlannedModel,
    workload: Workload,
    hardware: Sequence[Hardware],
    *,
    precisions: Sequence[str] = PRECISIONS,
    devices: Sequence[int] = (1,),
    simulate: bool = True,
    compare_engines: bool = True,
) -> Plan:
    """Return the plan of a model for a workload on one of several devices. Arguments as in `recommend`."""
    found = recommend(model.shape, hardware, workload, model.count, precisions=precisions, devices=devices)
    best = found.best
    notes = _notes(workload)
    advice = _advice(model, workload, best.option if best else None, hardware) if compare_engines else None
    if best is None:
        any_option = evaluate(Setup(model.shape, hardware[0], RECIPES["none"]), workload, model.count)
        split = _split(any_option, workload, simulate=simulate)
        return Plan(model, workload, any_option.kinds, found, None, split=split, advice=advice, notes=notes)
    option = best.option
    setup = option.setup
    batch = max(1, round(option.speed.batch)) if option.speed else 1
    exchanges = reductions(model.shape)
    return Plan(
        model,
        workload,
        option.kinds,
        found,
        simulate_option(option, workload) if simulate else None,
        savings=savings(option, workload, model.count),
        divisions=divisions(setup, exchanges) if setup.devices > 1 else (),
        split=_split(option, workload, simulate=simulate),
        speculation=_speculation(option, batch),
        advice=advice,
        notes=notes,
        fleet=plan_fleet(option, workload, prompt_cost(option)) if simulate else None,
    )


def _split(option: Option, workload: Workload, *, simulate: bool) -> Split | None:
    """Weigh encoders apart by formulas, and have the simulator check a recommendation of them."""
    split = best_split(option, workload, max(2, option.replicas))
    if split is None or not split.recommended or not simulate:
        return split
    return split.judged(play_split(option, workload, split))


def _speculation(option: Option, batch: int) -> Mapping[int, tuple[float, float]]:
    """Tokens per step and speed-up by the number of drafts that prompt lookup would propose, free of cost."""
    context = sum(one.share * one.tokens.context for one in option.kinds)

    def step(rows: int) -> float:
        # The rows of one sequence read its keys and values together.
        made_of = Composition(decodes=batch * rows, decode_context=round(batch * context))
        return option.cost.step(made_of) + option.cost.between_s

    found = {}
    for drafts in DRAFTS:
        gain = speculation(drafts, ACCEPTANCE, step(1 + drafts), step(1), 0.0)
        found[drafts] = gain.tokens_per_step, gain.speedup
    return found


def _notes(workload: Workload) -> list[str]:
    notes = []
    if workload.keep < 1:
        measured = loss(workload.method, workload.keep)
        if measured is None:
            notes.append(f"{workload.method} was not measured at {workload.keep:.0%} of the visual tokens")
        else:
            notes.append(
                f"{workload.method} at {measured.keep:.0%} of the visual tokens lost {measured.points:g} "
                "points of right answers on the bundled evaluation (docs/relevance.md)"
            )
        if workload.method not in BEFORE_ENCODER:
            notes.append(
                f"{workload.method} leaves out tokens behind the encoder, which computes all of them"
            )
    return notes


def _advice(
    model: PlannedModel, workload: Workload, option: Option | None, hardware: Sequence[Hardware]
) -> Advice:
    device = option.setup.hardware if option else hardware[0]
    images = sum(share for share, kind in zip(workload.shares, workload.kinds, strict=True) if kind.images)
    situation = Situation(
        device=_device_kind(device),
        family=model.shape.family,
        several_devices=bool(option and option.setup.devices > 1),
        images="many" if images >= 0.25 else "few",
        follow_ups=any(kind.follow_ups or kind.seen for kind in workload.kinds),
        aim="latency" if workload.ttft_ms or workload.itl_ms else "balanced",
        steady_streams=bool(workload.itl_ms),
        json_answers=any(kind.json for kind in workload.kinds),
        visual_budgets=workload.keep < 1,
    )
    return advise(situation)


def _device_kind(device: Hardware) -> str:
    if device.kind == "gpu":
        return f"{device.vendor}-gpu" if device.vendor in ("nvidia", "amd", "intel") else "nvidia-gpu"
    return "arm-cpu" if "graviton" in device.name.lower() or device.vendor in ("aws", "arm") else "x86-cpu"


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
        from fovea.cli.plan.show import draw

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
        "json": args.json_share,
        **options.flag_values(Kind, args, REQUEST_FLAGS),
    }
    request = {name: value for name, value in flags.items() if value not in (None, ())}
    given = options.flag_values(Workload, args)
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
    from fovea.planner.emit import deploy_toml, encode_toml, engine_toml

    best = plan.recommendation.best
    if best is None:
        raise ConfigError("there is no configuration to write: none meets the targets", param="emit")
    gpus = {device.name: gpu for device in known_hardware() for gpu in GPUS if _same(device, gpu)}
    split = plan.split if plan.split is not None and plan.split.recommended else None
    files = {
        "engine.toml": engine_toml(best, plan.workload, split),
        "deploy.toml": deploy_toml(best, plan.workload, gpus, split),
    }
    if split is not None:
        files["encode.toml"] = encode_toml(best, plan.workload)
    for name in ("engine.toml", "encode.toml"):
        if name in files:
            read_back(name, files[name], best.option.setup.hardware)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            print(f"wrote {folder / name}", file=sys.stderr)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}", param="emit") from error


def read_back(name: str, text: str, hardware: Hardware) -> EngineConfig:
    """Return the settings of an emitted file as an engine reads them, checked on a stand-in for its device.

    Raises ConfigError if an engine would refuse them.
    """
    values = parse_toml(text, name)
    check_keys(name, values, ["model", *options.setting_names(EngineConfig)])
    del values["model"]
    config = EngineConfig.of(**{**values, "peer_key": "of the operator"} if "role" in values else values)
    config.check_on(hardware.device, config.model.dtype)
    return config


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
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text.lower())
    if match is None:
        raise ConfigError(
            f"size {text!r}; accepted: width and height in pixels, such as 1024x768", param="image"
        )
    return int(match[1]), int(match[2])


def _video(text: str) -> Video:
    match = re.fullmatch(r"(\d{1,6}):(.+)", text)
    if match is None:
        raise ConfigError(
            f"--video is {text!r}; accepted: frames and size, such as 16:640x360", param="video"
        )
    return Video(int(match[1]), *_size(match[2]))
