"""One configuration, evaluated: does the model fit, how fast is it, how many replicas, what does it cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from fovea.planner.capacity import Capacity, capacity
from fovea.planner.cost import CostModel
from fovea.planner.extras import Saving
from fovea.planner.roofline import Setup, cost_model
from fovea.planner.steady import Demand, Speed, closed, demand, most_rate, open_load
from fovea.planner.workload import Kind, TokenCount, Tokens, Workload, tokens_of

MOST_RUNNING = 256
"""Most sequences at once that a plan counts with, also if memory has room for more."""
HEADROOM = 0.85
"""Share of the highest rate that a replica is planned for. The rest is for bursts."""
IDLE_POWER = 0.3
"""Share of the power that an idle device takes."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Asked:
    """One kind of request in one configuration.

    share: its share of all requests, follow-ups included.
    kind, tokens, demand: what it is, its tokens, its busy seconds.
    """

    share: float
    kind: Kind
    tokens: Tokens
    demand: Demand


@dataclass(frozen=True, slots=True)
class Option:
    """One configuration and its figures.

    setup: model, device, precision, devices of a replica.
    capacity: memory of a replica.
    cost: times of its steps.
    asked: the kinds of requests.
    room: sequences at once.
    rate: highest requests/s of one replica that meet the targets.
    replicas: needed for the workload's rate; 0: no number of them meets the targets.
    speed: of one replica at its part of the rate; None: it cannot keep up.
    problem: why the configuration is impossible; empty if it is possible.
    """

    setup: Setup
    capacity: Capacity
    cost: CostModel
    asked: tuple[Asked, ...]
    room: int
    rate: float
    replicas: int
    speed: Speed | None
    problem: str = ""

    @property
    def devices(self) -> int:
        return self.replicas * self.setup.devices

    @property
    def price_per_hour(self) -> float | None:
        """US dollars per hour of all replicas; None: the device has no price."""
        price = self.setup.hardware.price
        return None if price is None else price * self.devices

    def price_per_request(self, workload: Workload) -> float | None:
        """US dollars per request at the workload's rate."""
        price = self.price_per_hour
        return None if price is None else price / 3600 / workload.requests_per_s

    def price_per_thousand_images(self, workload: Workload) -> float | None:
        """US dollars per 1,000 images in requests, cached ones included; None without images or price."""
        images = sum(one.share * len(one.kind.images) / (1 + one.kind.follow_ups) for one in self.asked)
        price = self.price_per_request(workload)
        return None if price is None or not images else 1000 * price / images

    def joules_per_request(self, workload: Workload) -> float | None:
        """Energy of a request: the devices' full power while busy, and a part of it while idle."""
        power = self.setup.hardware.tdp
        if power is None or self.speed is None:
            return None
        used = self.speed.busy + (1 - self.speed.busy) * IDLE_POWER
        return power * self.devices * used / workload.requests_per_s

    @property
    def sweep(self) -> list[tuple[int, Speed]]:
        """Speed of one replica by the number of clients that wait for their answers."""
        mix = [(one.share, one.demand) for one in self.asked]
        return [(count, closed(self.cost, mix, count)) for count in BATCHES if count <= max(1, self.room)]


def evaluate(setup: Setup, workload: Workload, count: TokenCount) -> Option:
    """Return a configuration with its figures.

    count: visual tokens of an image in this model.
    """
    asked = _asked(setup, workload, count)
    mix = [(one.share, one.tokens) for one in asked]
    memory = capacity(setup, mix, _working_set(setup, asked, workload))
    room = min(memory.requests, MOST_RUNNING)
    sizes = [tokens for one in asked for tokens in one.tokens.images]
    cost = cost_model(setup, max(sizes, default=1024), round(max(one.tokens.context for one in asked)))
    asked = tuple(_with_demand(setup, cost, one) for one in asked)
    problem = _problem(setup, memory, asked)
    if problem:
        return Option(setup, memory, cost, asked, room, 0.0, 0, None, problem)
    parts = [(one.share, one.demand) for one in asked]
    targets = {"ttft_s": workload.ttft_ms / 1e3, "itl_s": workload.itl_ms / 1e3}
    rate = most_rate(cost, parts, room, **targets, percentile=workload.percentile)
    if not rate:
        problem = _late(cost, parts, room, workload)
        return Option(setup, memory, cost, asked, room, 0.0, 0, None, problem)
    replicas = max(1, math.ceil(workload.requests_per_s / (rate * HEADROOM) - 1e-9))
    speed = open_load(cost, parts, workload.requests_per_s / replicas, room, workload.percentile)
    return Option(setup, memory, cost, asked, room, rate, replicas, speed)


def savings(option: Option, workload: Workload, count: TokenCount) -> list[Saving]:
    """Return what the caches and the reduction of visual tokens save in this configuration."""
    full = _busy(option, workload, count, lambda kind: kind)
    found = []
    for name, without in (
        ("encoder cache", lambda kind: replace(kind, seen=0.0)),
        ("prefix cache", lambda kind: replace(kind, follow_ups=0.0)),
    ):
        more = _busy(option, workload, count, without)
        if more > full:
            found.append(Saving(name, more - full, (more - full) / more))
    return found


def _busy(option: Option, workload: Workload, count: TokenCount, change: Callable[[Kind], Kind]) -> float:
    """Mean busy seconds before the first token, with every kind changed."""
    total = 0.0
    for one in option.asked:
        tokens = tokens_of(change(one.kind), workload, count)
        if change(one.kind).follow_ups != one.kind.follow_ups:  # every question is computed anew
            longer = one.tokens.prompt
            tokens = Tokens(
                tokens.images, tokens.visual, tokens.encoded, longer, longer - workload.system,
                tokens.answer, tokens.chosen,
            )  # fmt: skip
        total += one.share * demand(option.cost, tokens).first
    return total


def _asked(setup: Setup, workload: Workload, count: TokenCount) -> tuple[Asked, ...]:
    kinds = list(zip(workload.shares, workload.kinds, strict=True))
    total = sum(share * (1 + kind.follow_ups) for share, kind in kinds)
    nothing = Demand(0, 0, 0, 0, 0)
    return tuple(
        Asked(share * (1 + kind.follow_ups) / total, kind, tokens_of(kind, workload, count), nothing)
        for share, kind in kinds
    )


def _with_demand(setup: Setup, cost: CostModel, one: Asked) -> Asked:
    pixels = sum(width * height for width, height in one.kind.images)
    if one.kind.video is not None:
        pixels += one.kind.video.frames * one.kind.video.width * one.kind.video.height
    overheads = setup.overheads
    busy = demand(cost, one.tokens, pixels=pixels, request_s=overheads.request_s, pixel_s=overheads.pixel_s)
    return Asked(one.share, one.kind, one.tokens, busy)


def _working_set(setup: Setup, asked: tuple[Asked, ...], workload: Workload) -> int:
    """Bytes of the encoder outputs of a minute, among which are those that others ask about again."""
    row = setup.shape.visual_token_numbers * setup.precision.itemsize
    images = sum(one.share * sum(one.tokens.images) * one.tokens.encoded for one in asked)
    return round(60 * workload.requests_per_s * images * row)


def _problem(setup: Setup, memory: Capacity, asked: tuple[Asked, ...]) -> str:
    """Why no request can run at all; empty if one can."""
    where = f"{setup.devices} x {setup.hardware.name}"
    heads = min((group.heads for group in setup.shape.attention), default=1)
    if heads % setup.devices:
        return f"{heads} heads cannot be divided among {setup.devices} devices"
    longest = max(asked, key=lambda one: one.tokens.longest)
    if longest.tokens.longest > setup.shape.max_positions:
        return (
            f"a request of kind {longest.kind.name!r} takes {longest.tokens.longest:,.0f} tokens; "
            f"{setup.shape.name} has {setup.shape.max_positions:,} positions"
        )
    if memory.weight_bytes + memory.work > memory.total:
        return (
            f"the weights take {memory.weight_bytes / 1e9:.1f} GB; {where} have {memory.total / 1e9:.1f} GB, "
            f"of which {memory.work / 1e9:.1f} GB are for activations"
        )
    if not memory.requests:
        return (
            f"beside {memory.weight_bytes / 1e9:.1f} GB of weights {memory.kv / 1e9:.2f} GB are left; "
            f"one request takes {memory.request_bytes / 1e9:.2f} GB of KV and states"
        )
    return ""


def _late(cost: CostModel, parts: list[tuple[float, Demand]], room: int, workload: Workload) -> str:
    """Why even a single request misses the targets."""
    alone = open_load(cost, parts, 1e-6, room, workload.percentile)
    if alone is None:
        return "not even one request at a time can be answered"
    missed = []
    if workload.ttft_ms and alone.ttft_p_s * 1e3 > workload.ttft_ms:
        missed.append(
            f"an undisturbed request has its first token after {alone.ttft_p_s * 1e3:.0f} ms; "
            f"the target is {workload.ttft_ms:g} ms"
        )
    if workload.itl_ms and alone.itl_p_s * 1e3 > workload.itl_ms:
        missed.append(
            f"an undisturbed stream has a token every {alone.itl_p_s * 1e3:.1f} ms; "
            f"the target is {workload.itl_ms:g} ms"
        )
    return "; ".join(missed)
