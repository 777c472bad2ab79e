"""Dividing a model over devices, and an encoder from its decoder."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.planner.capacity import TOWER
from fovea.planner.cost import CostModel
from fovea.planner.memory import weight_bytes
from fovea.planner.roofline import Setup
from fovea.planner.steady import Demand, decode_step, mean_demand
from fovea.planner.workload import Tokens


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


@dataclass(frozen=True, slots=True)
class Split:
    """Encoders on replicas of their own beside those that decode.

    encoders, decoders: replicas of each.
    requests_per_s: of all together.
    integrated_per_s: of as many replicas that do both.
    itl_s: mean time between tokens; `integrated_itl_s` with encoding in between.
    transfer_s: sending the encoder's output of one request over the link.
    """

    encoders: int
    decoders: int
    requests_per_s: float
    integrated_per_s: float
    itl_s: float
    integrated_itl_s: float
    transfer_s: float


def best_split(
    setup: Setup, cost: CostModel, mix: list[tuple[float, Demand, Tokens]], replicas: int, batch: int
) -> Split | None:
    """Return the best division of replicas into encoders and decoders; None: there are not enough.

    batch: sequences that decode together in a replica.
    """
    mean = mean_demand([(share, one) for share, one, _ in mix])
    if replicas < 2 or not mean.encode:
        return None
    step = decode_step(cost, batch, mean.context)
    decode = mean.tokens * step / batch
    rates = {
        encoders: min(encoders / mean.encode, (replicas - encoders) / (mean.prefill + decode))
        for encoders in range(1, replicas)
    }
    encoders = max(rates, key=lambda count: rates[count])
    integrated = replicas / (mean.first + decode)
    sent = sum(share * sum(tokens.encoder_rows) * tokens.encoded for share, _, tokens in mix)
    link = setup.hardware.link_bandwidth * setup.hardware.share("link")
    decoders = replicas - encoders
    prompts = rates[encoders] / decoders * mean.prefill
    both = integrated / replicas * mean.first
    return Split(
        encoders,
        decoders,
        rates[encoders],
        integrated,
        step / max(1e-9, 1 - prompts),
        step / max(1e-9, 1 - both),
        sent * cost.visual_token_bytes / link if link else 0.0,
    )


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]
