"""Dividing a model over devices, and an encoder from its decoder."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fovea.planner.capacity import TOWER
from fovea.planner.memory import weight_bytes
from fovea.planner.option import HEADROOM, Option
from fovea.planner.roofline import Setup
from fovea.planner.steady import Demand, mean_demand, most_rate, open_load
from fovea.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class Division:
    """One way to divide a model over the devices of a replica.

    tensor, pipeline, expert: devices among which each layer, the layers, and the experts are divided.
    weight_bytes: of the device that holds most.
    kv_copies: how many devices hold the same KV, because KV heads are not split; 1 is best.
    exchanges: sums over the devices in one step.
    bubble: share of a step in which a device of a pipeline waits, with `micro_batches`.
    """

    tensor: int
    pipeline: int
    expert: int
    weight_bytes: int
    kv_copies: int
    exchanges: int
    bubble: float


def divisions(setup: Setup, exchanges: int, micro_batches: int = 4) -> list[Division]:
    """Return the ways to divide a model over `setup.devices` devices, the best-balanced first.

    exchanges: sums of a step with tensor parallel (`roofline.reductions`).
    micro_batches: parts of a batch that fill a pipeline; its bubble is (p - 1) / (m + p - 1) (GPipe, arXiv
        1811.06965).
    """
    shape, devices = setup.shape, setup.devices
    one = weight_bytes(shape, setup.precision)
    heads = min((group.kv_heads for group in shape.attention), default=1)
    query = min((group.heads for group in shape.attention), default=1)
    found = []
    for tensor in _divisors(devices):
        pipeline = devices // tensor
        if query % tensor or pipeline > shape.layers:
            continue
        shared = max(count for count in _divisors(tensor) if heads % count == 0)
        expert = tensor if shape.experts else 1
        tower = sum(one.get(part, 0) for part in TOWER)
        rest = sum(one.values()) - tower
        largest = rest // (tensor * pipeline) + tower
        bubble = (pipeline - 1) / (micro_batches + pipeline - 1)
        found.append(
            Division(
                tensor, pipeline, expert, largest, tensor // shared, exchanges if tensor > 1 else 0, bubble
            )
        )
    return sorted(found, key=lambda division: (division.kv_copies, division.bubble))


WORTH_SPLIT = 1.05
"""Encoders apart are recommended if they serve more than this multiple of the requests per second."""
GAP_LOAD = 0.7
"""Gaps are compared at most at this share of the highest rate."""


@dataclass(frozen=True, slots=True)
class Split:
    """Encoders on replicas of their own beside those that decode, against as many that do both.

    encoders, decoders: replicas of each.
    requests_per_s, integrated_per_s: highest rates of all replicas together that meet the targets, with
        encoders apart and without; 0: they never meet them.
    at_per_s: rate of the times below: the workload's, or a part of the highest rate of the slower way.
    itl_s, integrated_itl_s: mean time between tokens. `itl_p_s`, `integrated_itl_p_s`: at the percentile of
        the targets.
    transfer_s: sending the encoder's output of one request over the link.
    recommended: whether encoders apart are worth it.
    played: both ways in the simulator at `requests_per_s`; None: they were not played.
    """

    encoders: int
    decoders: int
    requests_per_s: float
    integrated_per_s: float
    at_per_s: float
    itl_s: float
    integrated_itl_s: float
    itl_p_s: float
    integrated_itl_p_s: float
    transfer_s: float
    recommended: bool
    played: PlayedSplit | None = None

    @property
    def replicas(self) -> int:
        return self.encoders + self.decoders

    def judged(self, played: PlayedSplit) -> Split:
        """Return this split, recommended only if the simulator agrees.

        It agrees if encoders apart meet the targets at a rate at which integrated replicas miss them.
        """
        return replace(self, recommended=played.met and not played.integrated_met, played=played)


@dataclass(frozen=True, slots=True)
class PlayedSplit:
    """Both ways in the simulator, under the same load.

    met, integrated_met: whether first tokens and gaps meet the targets at their percentile.
    itl_p_s, integrated_itl_p_s: time between tokens at that percentile. `ttft_p_s`,
        `integrated_ttft_p_s`: time to the first token.
    """

    met: bool
    integrated_met: bool
    itl_p_s: float
    integrated_itl_p_s: float
    ttft_p_s: float
    integrated_ttft_p_s: float


def best_split(option: Option, workload: Workload, replicas: int) -> Split | None:
    """Return the best division of replicas into encoders and decoders, and whether it is worth it.

    Encoders take time away from no decode. In return they have only images to do, and decoders only the
    rest, so that one of both waits for the other unless their work has just the ratio of their numbers.
    Without targets encoders apart never serve more requests; with targets they can.

    Returns None if there are not enough replicas, no request has an image to encode, or the model does not
    fit.
    """
    cost, mix, running = option.cost, option.mix, option.max_running
    mean = mean_demand(mix)
    if replicas < 2 or not mean.encode or not running:
        return None
    setup = option.setup
    rows = sum(one.share * sum(one.tokens.encoder_rows) * one.tokens.encoded for one in option.kinds)
    link = setup.hardware.link_bandwidth * setup.hardware.share("link")
    sent = rows * cost.visual_token_bytes / link if link else 0.0
    apart = [(share, _without_images(one, sent * one.encode / mean.encode)) for share, one in mix]
    targets = {"ttft_s": workload.ttft_ms / 1e3, "itl_s": workload.itl_ms / 1e3}
    percentile = workload.percentile
    one_decoder = most_rate(cost, apart, running, **targets, percentile=percentile)
    # A queue in front of the encoders delays first tokens, and grows without end when they are always busy.
    one_encoder = (HEADROOM if workload.ttft_ms else 1.0) / mean.encode
    rates = {
        encoders: min(encoders * one_encoder, (replicas - encoders) * one_decoder)
        for encoders in range(1, replicas)
    }
    encoders = max(rates, key=lambda count: rates[count])
    rate, decoders = rates[encoders], replicas - encoders
    integrated = replicas * most_rate(cost, mix, running, **targets, percentile=percentile)
    slower = min(rate, integrated) or max(rate, integrated)
    at = min(workload.requests_per_s, GAP_LOAD * slower) or workload.requests_per_s
    one = open_load(cost, apart, at / decoders, running, percentile)
    other = open_load(cost, mix, at / replicas, running, percentile)
    itl_p, integrated_p = (math.inf if speed is None else speed.itl_p_s for speed in (one, other))
    target = targets["itl_s"]
    saves_gaps = bool(target) and itl_p <= target < integrated_p
    return Split(
        encoders,
        decoders,
        rate,
        integrated,
        at,
        math.inf if one is None else one.itl_s,
        math.inf if other is None else other.itl_s,
        itl_p,
        integrated_p,
        sent,
        rate > WORTH_SPLIT * integrated or (saves_gaps and rate >= workload.requests_per_s),
    )


def split_sentence(split: Split | None, workload: Workload) -> str:
    """Say in a sentence whether some replicas should only encode, with the figures of both ways."""
    if split is None:
        return "Encoders apart: no request has an image to encode, so there is nothing to split."
    target = " within the targets" if workload.ttft_ms or workload.itl_ms else ""
    few = f"{split.encoders} of {split.replicas} replicas"
    played = split.played
    if played is None:
        gap, other, at = split.itl_p_s, split.integrated_itl_p_s, split.at_per_s
    else:
        gap, other, at = played.itl_p_s, played.integrated_itl_p_s, split.requests_per_s
    gaps = f"between tokens at {workload.percentile:g}% with {at:.3g} requests/s"
    if split.recommended:
        checked = "by formulas alone" if played is None else "the simulator agrees"
        return (
            f"Encoders apart: yes, let {few} only encode (role encode): {split.requests_per_s:.3g} "
            f"requests/s{target} instead of {split.integrated_per_s:.3g}, and {_milliseconds(gap)} instead "
            f"of {_milliseconds(other)} {gaps} ({checked})."
        )
    if played is not None:
        return (
            f"Encoders apart: no, let all {split.replicas} replicas do everything: formulas give "
            f"{split.requests_per_s:.3g} instead of {split.integrated_per_s:.3g} requests/s{target} if {few} "
            f"only encode, but the simulator does not confirm it: {_milliseconds(gap)} instead of "
            f"{_milliseconds(other)} {gaps}."
        )
    return (
        f"Encoders apart: no, let all {split.replicas} replicas do everything: "
        f"{split.integrated_per_s:.3g} requests/s{target} instead of {split.requests_per_s:.3g} if {few} "
        f"only encode, and {_milliseconds(other)} instead of {_milliseconds(gap)} {gaps}."
    )


def _milliseconds(seconds: float) -> str:
    return "too long" if math.isinf(seconds) else f"{1e3 * seconds:.1f} ms"


def _without_images(one: Demand, sent: float) -> Demand:
    """The demand of a request whose images come from elsewhere: it waits for them before it is scheduled."""
    return replace(one, encode=0.0, prepare=one.prepare + one.encode + sent)


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]
