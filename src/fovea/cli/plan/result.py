"""The result of a plan, and its values for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fovea.bench.measure import without_nan
from fovea.cli.plan.advice import as_dict as advice_dict
from fovea.cli.plan.model import PlannedModel
from fovea.cli.plan.simulated import Simulated
from fovea.planner.advisor import Recommendation as Advice
from fovea.planner.extras import Saving
from fovea.planner.option import Asked, Option
from fovea.planner.parallel import Division, Split
from fovea.planner.recommend import Choice, Recommendation
from fovea.planner.stages import request_bytes, request_stages
from fovea.planner.steady import decode_step
from fovea.planner.workload import Workload

STAGES = ("prepare", "encode", "prefill", "ttft", "itl", "whole")
"""Names of the figures that `stages` returns."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `fovea plan` found out.

    model, workload: what was asked.
    asked: the kinds of requests with their tokens, of the recommended configuration, or of any.
    recommendation: the configurations.
    simulated: the recommended one on the simulator; None: it was not simulated.
    savings, divisions, split: of the recommended one.
    speculation: tokens per step and speed-up by the number of drafts.
    advice: which engine suits; None: not asked for.
    notes: what a reader has to know.
    """

    model: PlannedModel
    workload: Workload
    asked: Sequence[Asked]
    recommendation: Recommendation
    simulated: Simulated | None
    savings: Sequence[Saving] = ()
    divisions: Sequence[Division] = ()
    split: Split | None = None
    speculation: Mapping[int, tuple[float, float]] | None = None
    advice: Advice | None = None
    notes: Sequence[str] = ()

    def kv_megabytes(self, one: Asked) -> tuple[float, float]:
        """KV of visual tokens and of all others at the end of a request, in 10^6 bytes.

        It is that of the recommended precision, or of bfloat16 without layers with windows.
        """
        best = self.recommendation.best
        if best is None:
            each = self.model.shape.kv_bytes_per_token(2) / 1e6
            return each * one.tokens.visual, each * (one.tokens.longest - one.tokens.visual)
        found = request_bytes(best.option, one)
        return (found.visual_kv + found.image_states) / 1e6, found.text_kv / 1e6

    @property
    def stages(self) -> list[tuple[float, ...]]:
        """Seconds of one request of each kind, alone: prepare, encode, prefill, first token, gap, whole."""
        best = self.recommendation.best
        return [] if best is None else [stages(best.option, one) for one in best.option.asked]


def stages(option: Option, one: Asked) -> tuple[float, ...]:
    """Return the seconds of one undisturbed request: see `Plan.stages`."""
    gap = decode_step(option.cost, 1, one.tokens.context)
    first = one.demand.prepare + one.demand.first
    whole = first + max(0.0, one.tokens.chosen - 1) * gap
    return one.demand.prepare, one.demand.encode, one.demand.prefill, first, gap, whole


def as_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as values of JSON. Times are seconds, sizes bytes, prices US dollars."""
    shape, best = plan.model.shape, plan.recommendation.best
    values = {
        "fovea_plan": 1,
        "model": {
            "name": shape.name, "family": shape.family, "parameters": shape.parameters,
            "kv_bytes_per_token": shape.kv_bytes_per_token(2), "state_bytes": shape.state_bytes(2),
        },
        "workload": asdict(plan.workload),
        "requests": [
            {"name": one.kind.name, "share": one.share, **asdict(one.tokens)} for one in plan.asked
        ],
        "best": None if best is None else _choice(best, plan.workload),
        "others": [_choice(choice, plan.workload) for choice in plan.recommendation.others],
        "impossible": [
            {"configuration": title, "because": problem}
            for title, problem in plan.recommendation.impossible
        ],
        "simulated": None if plan.simulated is None else asdict(plan.simulated),
        "savings": [asdict(saving) for saving in plan.savings],
        "divisions": [asdict(division) for division in plan.divisions],
        "split": None if plan.split is None else asdict(plan.split),
        "speculation": [
            {"drafts": drafts, "tokens_per_step": tokens, "speedup": speedup}
            for drafts, (tokens, speedup) in (plan.speculation or {}).items()
        ],
        "advice": None if plan.advice is None else advice_dict(plan.advice),
        "notes": list(plan.notes),
    }  # fmt: skip
    found: dict[str, Any] = without_nan(values)
    return found


def _choice(choice: Choice, workload: Workload) -> dict[str, Any]:
    option = choice.option
    setup = option.setup
    return {
        "title": choice.title, "hardware": setup.hardware.name, "devices_per_replica": setup.devices,
        "replicas": option.replicas, "quantization": choice.precision, "precision": asdict(setup.precision),
        "reasons": list(choice.reasons), "memory": asdict(option.capacity), "room": option.room,
        "most_requests_per_s": option.rate, "speed": None if option.speed is None else asdict(option.speed),
        "stages": [dict(zip(STAGES, stages(option, one), strict=True)) for one in option.asked],
        "work": [
            {
                "kind": one.kind.name, "stages": [asdict(stage) for stage in request_stages(option, one)],
                "bytes": asdict(request_bytes(option, one)),
            }
            for one in option.asked
        ],
        "sweep": [{"clients": clients, **asdict(speed)} for clients, speed in option.sweep],
        "price_per_hour": option.price_per_hour,
        "price_per_request": option.price_per_request(workload),
        "price_per_thousand_images": option.price_per_thousand_images(workload),
        "joules_per_request": option.joules_per_request(workload), "cost": asdict(option.cost),
    }  # fmt: skip
