"""The result of a plan, its values for JSON, and its workload on the simulator.

The simulator runs the engine's own scheduler, with the plan's times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

from fovea.bench.measure import without_nan
from fovea.cli.advise import advice_as_dict as advice_dict
from fovea.cli.plan.fleet import PlannedFleet
from fovea.cli.plan.inputs import PlannedModel
from fovea.core.measure import percentile
from fovea.core.trace import TraceRequest, geometric
from fovea.engine.config import EngineConfig
from fovea.engine.simulate.fleet import Fleet, simulate_fleet
from fovea.engine.simulate.run import Next, simulated_records
from fovea.planner.advisor import Recommendation as Advice
from fovea.planner.cost import CostModel
from fovea.planner.option import Option, PlannedKind, Saving
from fovea.planner.parallel import Division, PlayedSplit, Split
from fovea.planner.recommend import Choice, Recommendation
from fovea.planner.stages import request_bytes, request_stages
from fovea.planner.steady import decode_step
from fovea.planner.workload import Workload

CONVERSATIONS = 200
MOST_PLAYED = 6
"""Most replicas that are simulated to compare encoders apart with integrated ones."""
CONVERSATIONS_PER_REPLICA = 80
THINK_S = 5.0
"""Mean pause of a user before a follow-up."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Simulated:
    """The figures that clients of one simulated replica see.

    requests: how many there were.
    ttft_s, ttft_p_s: time to the first token, in the mean and at the percentile of the targets.
    itl_s, itl_p_s: the same for the time between tokens.
    tokens_per_s: of all answers.
    within: share of the requests whose first token came within the target; 1 without a target.
    """

    requests: int
    ttft_s: float
    ttft_p_s: float
    itl_s: float
    itl_p_s: float
    tokens_per_s: float
    within: float


def simulate_option(option: Option, workload: Workload, seed: int = 0) -> Simulated:
    """Simulate one replica at its part of the rate, with independent arrivals."""
    trace, following, prepare = _trace(option, workload, Random(seed))
    config = EngineConfig.of(
        kv_cache_mib=max(1, option.capacity.kv // MIB),
        max_running=max(1, option.max_running),
        max_queue=0,
        target_itl_ms=round(workload.itl_ms),
        embed_cache_mib=max(1, option.capacity.encoder_cache // MIB),
    )
    records = simulated_records(
        trace, config, prompt_cost(option), following=following, prepare=lambda request: prepare[id(request)]
    )
    answered = [record for record in records if record.tokens]
    first = sorted(record.tokens[0] - record.arrival for record in answered)
    gaps = sorted(gap for record in answered for gap in record.gaps)
    target = workload.ttft_ms / 1e3
    # The first conversations find an idle replica, and after the last arrival the load ends.
    sent = sorted(record.arrival for record in answered)
    start, end = sent[len(sent) // 4], sent[-1]
    counted = sum(start <= token < end for record in answered for token in record.tokens)
    return Simulated(
        requests=len(answered),
        ttft_s=fmean(first),
        ttft_p_s=percentile(first, workload.percentile),
        itl_s=fmean(gaps) if gaps else math.nan,
        itl_p_s=percentile(gaps, workload.percentile) if gaps else math.nan,
        tokens_per_s=counted / (end - start) if end > start else math.nan,
        within=sum(one <= target for one in first) / len(first) if target else 1.0,
    )


def play_split(option: Option, workload: Workload, split: Split, seed: int = 0) -> PlayedSplit:
    """Simulate replicas with encoders apart, and as many without, at the highest rate of the first.

    Many replicas are represented by a few in the same proportion.
    """
    fewer = min(1.0, MOST_PLAYED / split.replicas)
    encoders = max(1, round(split.encoders * fewer))
    fleet = Fleet(max(1, round(split.replicas * fewer) - encoders), encoders)
    per_s = split.requests_per_s * (fleet.replicas + fleet.encoders) / split.replicas
    faster = replace(workload, rate=workload.rate * per_s / workload.requests_per_s)
    conversations = CONVERSATIONS_PER_REPLICA * (fleet.replicas + fleet.encoders)
    trace, following, prepare = _trace(replace(option, replicas=1), faster, Random(seed), conversations)
    config = EngineConfig.of(
        kv_cache_mib=max(1, option.capacity.kv // MIB),
        max_running=max(1, option.max_running),
        max_queue=0,
        embed_cache_mib=max(1, option.capacity.encoder_cache // MIB),
    )
    figures: list[float] = []
    met = []
    for one in (fleet, fleet.integrated):
        records = simulate_fleet(
            trace,
            config,
            prompt_cost(option),
            one,
            following=following,
            prepare=lambda request: prepare[id(request)],
        ).records
        answered = [record for record in records[len(records) // 4 :] if record.tokens]
        gaps = sorted(gap for record in answered for gap in record.gaps)
        first = sorted(record.tokens[0] - record.arrival for record in answered)
        gap = percentile(gaps, workload.percentile) if gaps else 0.0
        ttft = percentile(first, workload.percentile)
        late = (workload.itl_ms and 1e3 * gap > workload.itl_ms) or (
            workload.ttft_ms and 1e3 * ttft > workload.ttft_ms
        )
        met.append(not late)
        figures += [gap, ttft]
    gap, ttft, other_gap, other_ttft = figures
    return PlayedSplit(met[0], met[1], gap, other_gap, ttft, other_ttft)


def prompt_cost(option: Option) -> CostModel:
    """The costs of images by their tokens in the prompt, which the simulator knows, not by encoder rows."""
    rows = sum(one.share * sum(one.tokens.encoder_rows) for one in option.kinds)
    visual = sum(one.share * one.tokens.visual for one in option.kinds)
    ratio = rows / visual if visual else 1.0
    cost = option.cost
    return replace(cost, visual_s=cost.visual_s * ratio, visual_pair_s=cost.visual_pair_s * ratio**2)


def _trace(
    option: Option, workload: Workload, random: Random, conversations: int = CONVERSATIONS
) -> tuple[tuple[TraceRequest, ...], Mapping[int, Next], Mapping[int, float]]:
    """Conversations that begin at random times, each with its follow-ups."""
    rate = workload.rate / max(1, option.replicas)
    weights = [one.share / (1 + one.kind.follow_ups) for one in option.kinds]
    trace: list[TraceRequest] = []
    following: dict[int, Next] = {}
    prepare: dict[int, float] = {}
    at, known = 0.0, 0
    for _ in range(conversations):
        at += random.expovariate(rate)
        one: PlannedKind = random.choices(option.kinds, weights)[0]
        images = []
        rows = sum(one.tokens.images)
        for tokens in one.tokens.images:
            fresh = random.random() >= one.kind.seen or not known
            known += fresh
            key = known if fresh else random.randint(1, known)
            images.append((f"image {key} {tokens}", max(1, math.ceil(one.tokens.visual * tokens / rows))))
        turns = 1 + _follow_ups(one.kind.follow_ups, random)
        for turn in range(turns):
            request = TraceRequest(
                at if not turn else random.expovariate(1 / THINK_S),
                geometric(random, one.kind.text),
                max(1, round(one.tokens.chosen / one.kind.answer * geometric(random, one.kind.answer))),
                () if turn else tuple(images),
                0 if turn else workload.system,
            )
            if turn:
                following[len(trace) - 1] = Next(len(trace), continues=True)
            prepare[id(request)] = option.setup.overheads.request_s if turn else one.demand.prepare
            trace.append(request)
    return tuple(trace), following, prepare


def _follow_ups(mean: float, random: Random) -> int:
    """A number of follow-ups with this mean: the whole part, and one more with the rest's probability."""
    return int(mean) + (random.random() < mean % 1)


STAGES = ("prepare", "encode", "prefill", "ttft", "itl", "whole")
"""Names of the figures that `stages` returns."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `fovea plan` found out.

    model, workload: what was asked.
    kinds: the kinds of requests with their tokens, of the recommended configuration, or of any.
    recommendation: the configurations.
    simulated: the recommended one on the simulator; None: it was not simulated.
    savings, divisions, split: of the recommended one.
    speculation: tokens per step and speed-up by the number of drafts.
    advice: which engine suits; None: not asked for.
    notes: what a reader has to know.
    fleet: the replicas behind a gateway, simulated; None: one is enough, or it was not simulated.
    """

    model: PlannedModel
    workload: Workload
    kinds: Sequence[PlannedKind]
    recommendation: Recommendation
    simulated: Simulated | None
    savings: Sequence[Saving] = ()
    divisions: Sequence[Division] = ()
    split: Split | None = None
    speculation: Mapping[int, tuple[float, float]] | None = None
    advice: Advice | None = None
    notes: Sequence[str] = ()
    fleet: PlannedFleet | None = None

    def kv_megabytes(self, one: PlannedKind) -> tuple[float, float]:
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
        return [] if best is None else [stages(best.option, one) for one in best.option.kinds]


def stages(option: Option, one: PlannedKind) -> tuple[float, ...]:
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
            {"name": one.kind.name, "share": one.share, **asdict(one.tokens)} for one in plan.kinds
        ],
        "best": None if best is None else _choice(best, plan.workload),
        "others": [_choice(choice, plan.workload) for choice in plan.recommendation.others],
        "impossible": [
            {"configuration": title, "because": problem}
            for title, problem in plan.recommendation.impossible
        ],
        "refused": list(plan.recommendation.refused),
        "simulated": None if plan.simulated is None else asdict(plan.simulated),
        "savings": [asdict(saving) for saving in plan.savings],
        "divisions": [asdict(division) for division in plan.divisions],
        "split": None if plan.split is None else asdict(plan.split),
        "fleet": None if plan.fleet is None else asdict(plan.fleet),
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
        "reasons": list(choice.reasons), "memory": asdict(option.capacity), "room": option.max_running,
        "most_requests_per_s": option.rate, "speed": None if option.speed is None else asdict(option.speed),
        "stages": [dict(zip(STAGES, stages(option, one), strict=True)) for one in option.kinds],
        "work": [
            {
                "kind": one.kind.name, "stages": [asdict(stage) for stage in request_stages(option, one)],
                "bytes": asdict(request_bytes(option, one)),
            }
            for one in option.kinds
        ],
        "sweep": [{"clients": clients, **asdict(speed)} for clients, speed in option.sweep],
        "price_per_hour": option.price_per_hour,
        "price_per_request": option.price_per_request(workload),
        "price_per_thousand_images": option.price_per_thousand_images(workload),
        "joules_per_request": option.joules_per_request(workload), "cost": asdict(option.cost),
    }  # fmt: skip
