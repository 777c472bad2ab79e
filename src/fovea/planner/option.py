"""One configuration, evaluated: does the model fit, how fast is it, how many replicas, what does it cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fovea.planner.capacity import Capacity, capacity, sequence_bytes
from fovea.planner.cost import CostModel
from fovea.planner.memory import output_bytes
from fovea.planner.roofline import TYPICAL_TOKENS, Setup, cost_model
from fovea.planner.steady import SLOWEST_RATE, Demand, Mix, Speed, closed, demand, most_rate, open_load
from fovea.planner.workload import Kind, TokenCount, Tokens, Workload, frame_group, tokens_of, variants


@dataclass(frozen=True, slots=True)
class Speculation:
    """The gain of speculative decoding.

    tokens_per_step: tokens that one step of verification yields, in the mean.
    speedup: through decoding without drafts.
    """

    tokens_per_step: float
    speedup: float


def speculation(
    drafts: int, acceptance: float, verify_s: float, step_s: float, draft_s: float
) -> Speculation:
    """Return the gain of verifying some drafts in each step.

    Each draft is accepted with the same probability if those before it were: then a step yields
    (1 - a^(k+1)) / (1 - a) tokens, its own included (Leviathan and others, arXiv 2211.17192, equation 1).

    drafts: drafts per step (k).
    acceptance: their probability (a), 0 to 1.
    verify_s: seconds of a step that verifies them.
    step_s: seconds of a step without drafts.
    draft_s: seconds in which one draft is made.
    """
    a, k = acceptance, drafts
    tokens = float(k + 1) if a == 1 else (1 - a ** (k + 1)) / (1 - a)
    return Speculation(tokens, tokens * step_s / (verify_s + k * draft_s))


@dataclass(frozen=True, slots=True)
class Saving:
    """Seconds of encoder and prompt per request that something saves.

    name: what saves them.
    seconds: saved, in the mean over all requests.
    share: of the busy seconds of a request without it.
    kv_bytes: of KV that one request less needs.
    """

    name: str
    seconds: float
    share: float
    kv_bytes: float = 0.0


MOST_RUNNING = 256
"""Most sequences at once that a plan counts with, also if memory has room for more."""
HEADROOM = 0.85
"""Share of the highest rate that a replica is planned for. The rest is for bursts."""
IDLE_POWER = 0.3
"""Share of the power that an idle device takes."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class PlannedKind:
    """One kind of request in one configuration.

    share: its share of all requests, follow-ups included.
    kind: the kind, as the workload describes it.
    tokens, demand: its tokens and busy seconds, in the mean over a conversation.
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
    kinds: the kinds of requests.
    mix: share and busy seconds of each variant of a kind: new images, known images, follow-ups.
    max_running: sequences at once.
    rate: highest requests/s of one replica that meet the targets.
    replicas: needed for the workload's rate; 0: no number of them meets the targets.
    speed: of one replica at its part of the rate; None: it cannot keep up.
    problem: why the configuration is impossible; empty if it is possible.
    """

    setup: Setup
    capacity: Capacity
    cost: CostModel
    kinds: tuple[PlannedKind, ...]
    mix: Mix
    max_running: int
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
        """US dollars per 1,000 images of conversations, cached ones included; None without images or price.

        All requests are in the price, those without an image, too. Frames of videos do not count as images.
        """
        images = sum(one.share * len(one.kind.images) / (1 + one.kind.follow_ups) for one in self.kinds)
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
        counts = [count for count in BATCHES if count <= max(1, self.max_running)]
        return [(count, closed(self.cost, self.mix, count)) for count in counts]


def evaluate(setup: Setup, workload: Workload, count: TokenCount) -> Option:
    """Return a configuration with its figures.

    count: visual tokens of an image in this model.
    """
    kinds = _planned_kinds(setup, workload, count)
    memory = capacity(setup, [(one.share, one.tokens) for one in kinds], _working_set(setup, kinds, workload))
    max_running = min(memory.requests, MOST_RUNNING)
    cost = _cost(setup, kinds)
    kinds = tuple(replace(one, demand=_demand(setup, cost, one, one.tokens)) for one in kinds)
    mix = [
        (one.share * share, _demand(setup, cost, one, tokens))
        for one in kinds
        for share, tokens in variants(one.kind, workload, one.tokens)
    ]
    option = Option(setup, memory, cost, kinds, mix, max_running, 0.0, 0, None)
    problem = _problem(setup, memory, kinds)
    if problem:
        return replace(option, problem=problem)
    targets = {"ttft_s": workload.ttft_ms / 1e3, "itl_s": workload.itl_ms / 1e3}
    rate = most_rate(cost, mix, max_running, **targets, percentile=workload.percentile)
    if not rate:
        return replace(option, problem=_late(cost, mix, max_running, workload))
    replicas = max(1, math.ceil(workload.requests_per_s / (rate * HEADROOM) - 1e-9))
    speed = open_load(cost, mix, workload.requests_per_s / replicas, max_running, workload.percentile)
    return replace(option, rate=rate, replicas=replicas, speed=speed)


def savings(option: Option, workload: Workload, count: TokenCount) -> list[Saving]:
    """Return what the caches and the reduction of visual tokens save in this configuration."""
    found = []
    for name, without in (
        ("encoder cache", _without_encoder_cache),
        ("prefix cache", _without_prefix_cache),
        (
            "fewer visual tokens",
            lambda one: _tokens(option.setup, one.kind, replace(workload, keep=1), count),
        ),
    ):
        less, more, kept = 0.0, 0.0, 0.0
        for one in option.kinds:
            tokens = without(one)
            less += one.share * demand(option.cost, one.tokens).first
            more += one.share * demand(option.cost, tokens).first
            own = sequence_bytes(option.setup, one.tokens.longest)
            kept += one.share * (sequence_bytes(option.setup, tokens.longest) - own)
        if more > less * (1 + 1e-9):
            found.append(Saving(name, more - less, (more - less) / more, kept))
    return found


def _without_encoder_cache(one: PlannedKind) -> Tokens:
    """Every first request encodes its images. Follow-ups find them in the prefix cache."""
    return replace(one.tokens, encoded=1 / (1 + one.kind.follow_ups) if one.tokens.images else 0.0)


def _without_prefix_cache(one: PlannedKind) -> Tokens:
    """Every request computes its whole prompt. The images are encoded as often as with the cache."""
    return replace(one.tokens, computed=one.tokens.prompt)


def _tokens(setup: Setup, kind: Kind, workload: Workload, count: TokenCount) -> Tokens:
    return tokens_of(kind, workload, count, frame_group(setup.shape.family))


def _planned_kinds(setup: Setup, workload: Workload, count: TokenCount) -> tuple[PlannedKind, ...]:
    kinds = list(zip(workload.shares, workload.kinds, strict=True))
    total = sum(share * (1 + kind.follow_ups) for share, kind in kinds)
    nothing = Demand()
    return tuple(
        PlannedKind(
            share * (1 + kind.follow_ups) / total, kind, _tokens(setup, kind, workload, count), nothing
        )
        for share, kind in kinds
    )


def _cost(setup: Setup, kinds: tuple[PlannedKind, ...]) -> CostModel:
    """The cost model around the largest image and the longest context of the workload."""
    sizes = [rows for one in kinds for rows in one.tokens.encoder_rows]
    context = round(max(one.tokens.context for one in kinds))
    rows = sum(one.share * sum(one.tokens.images) for one in kinds)
    return cost_model(setup, max(sizes, default=TYPICAL_TOKENS), context, rows)


def _demand(setup: Setup, cost: CostModel, one: PlannedKind, tokens: Tokens) -> Demand:
    pixels = sum(width * height for width, height in one.kind.images)
    if one.kind.video is not None:
        pixels += one.kind.video.frames * one.kind.video.width * one.kind.video.height
    overheads = setup.overheads
    return demand(cost, tokens, pixels=pixels, request_s=overheads.request_s, pixel_s=overheads.pixel_s)


def _working_set(setup: Setup, kinds: tuple[PlannedKind, ...], workload: Workload) -> int:
    """Bytes of the encoder outputs of a minute, among which are those that others ask about again."""
    row = output_bytes(setup.shape, setup.precision, 1)
    images = sum(one.share * sum(one.tokens.encoder_rows) * one.tokens.encoded for one in kinds)
    return round(60 * workload.requests_per_s * images * row)


def _problem(setup: Setup, memory: Capacity, kinds: tuple[PlannedKind, ...]) -> str:
    """Why no request can run at all; empty if one can."""
    where = f"{setup.devices} x {setup.hardware.name}"
    heads = min((group.heads for group in setup.shape.attention), default=1)
    if heads % setup.devices:
        return f"{heads} heads cannot be divided among {setup.devices} devices"
    longest = max(kinds, key=lambda one: one.tokens.last)
    if longest.tokens.last > setup.shape.max_positions:
        return (
            f"a conversation of kind {longest.kind.name!r} takes {longest.tokens.last:,.0f} tokens; "
            f"{setup.shape.name} has {setup.shape.max_positions:,} positions"
        )
    if memory.weight_bytes + memory.work > memory.total:
        return (
            f"the weights take {memory.weight_bytes / 1e9:.1f} GB; {where} have {memory.total / 1e9:.1f} GB, "
            f"and {memory.work / 1e9:.1f} GB of these are for activations"
        )
    if not memory.requests:
        return (
            f"beside {memory.weight_bytes / 1e9:.1f} GB of weights {memory.kv / 1e9:.2f} GB are left; "
            f"one request takes {memory.request_bytes / 1e9:.2f} GB of KV and states"
        )
    return ""


def _late(cost: CostModel, mix: Mix, max_running: int, workload: Workload) -> str:
    """Why even a single request misses the targets."""
    alone = open_load(cost, mix, SLOWEST_RATE, max_running, workload.percentile)
    if alone is None:
        return "a single request takes so long that not even one in a day can be answered"
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
