"""Plays a plan's workload on the simulator: the engine's own scheduler, with the plan's times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from fovea.core.measure import percentile
from fovea.core.trace import TraceRequest, geometric
from fovea.engine.config import EngineConfig
from fovea.engine.simulate.run import Next, simulated_records
from fovea.planner.cost import CostModel
from fovea.planner.option import Asked, Option
from fovea.planner.workload import Workload

CONVERSATIONS = 200
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
        max_running=max(1, option.room),
        max_queue=0,
        target_itl_ms=round(workload.itl_ms),
        embed_cache_mib=max(1, option.capacity.encoder_cache // MIB),
    )
    records = simulated_records(
        trace, config, _cost(option), following=following, prepare=lambda request: prepare[id(request)]
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


def _cost(option: Option) -> CostModel:
    """The costs of images by their tokens in the prompt, which the simulator knows, not by encoder rows."""
    rows = sum(one.share * sum(one.tokens.encoder_rows) for one in option.asked)
    visual = sum(one.share * one.tokens.visual for one in option.asked)
    ratio = rows / visual if visual else 1.0
    cost = option.cost
    return replace(cost, visual_s=cost.visual_s * ratio, visual_pair_s=cost.visual_pair_s * ratio**2)


def _trace(
    option: Option, workload: Workload, random: Random
) -> tuple[tuple[TraceRequest, ...], Mapping[int, Next], Mapping[int, float]]:
    """Conversations that begin at random times, each with its follow-ups."""
    rate = workload.rate / max(1, option.replicas)
    weights = [one.share / (1 + one.kind.follow_ups) for one in option.asked]
    trace: list[TraceRequest] = []
    following: dict[int, Next] = {}
    prepare: dict[int, float] = {}
    at, known = 0.0, 0
    for _ in range(CONVERSATIONS):
        at += random.expovariate(rate)
        one: Asked = random.choices(option.asked, weights)[0]
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
