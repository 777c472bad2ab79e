"""Puts a plan together: search, simulation, savings, divisions, advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fovea.cli.plan.model import PlannedModel
from fovea.cli.plan.result import Plan
from fovea.cli.plan.simulated import simulate_option
from fovea.planner.advisor import Recommendation as Advice
from fovea.planner.advisor import advise
from fovea.planner.composition import Composition
from fovea.planner.extras import speculation
from fovea.planner.hardware import Hardware
from fovea.planner.option import Option, evaluate, savings
from fovea.planner.parallel import best_split, divisions
from fovea.planner.precision import RECIPES
from fovea.planner.recommend import PRECISIONS, recommend
from fovea.planner.reduction import BEFORE_ENCODER, loss
from fovea.planner.roofline import Setup, reductions
from fovea.planner.situation import Situation
from fovea.planner.workload import Workload

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
        return Plan(model, workload, any_option.asked, found, None, advice=advice, notes=notes)
    option = best.option
    setup = option.setup
    mix = [(one.share, one.demand, one.tokens) for one in option.asked]
    batch = max(1, round(option.speed.batch)) if option.speed else 1
    exchanges = reductions(model.shape)
    return Plan(
        model,
        workload,
        option.asked,
        found,
        simulate_option(option, workload) if simulate else None,
        savings=savings(option, workload, model.count),
        divisions=divisions(setup, exchanges) if setup.devices > 1 else (),
        split=best_split(setup, option.cost, mix, max(2, option.replicas), batch),
        speculation=_speculation(option, batch),
        advice=advice,
        notes=notes,
    )


def _speculation(option: Option, batch: int) -> Mapping[int, tuple[float, float]]:
    """Tokens per step and speed-up by the number of drafts that prompt lookup would propose, free of cost."""
    context = sum(one.share * one.tokens.context for one in option.asked)

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
