"""The work of one request by stage, and the memory that it takes by kind of token.

All figures are of one request alone, on all devices of a replica together. A multiplication and an addition
are two operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fovea.planner.capacity import sequence_bytes
from fovea.planner.memory import output_bytes, state_bytes, weight_bytes
from fovea.planner.option import Option, PlannedKind
from fovea.planner.roofline import (
    Setup,
    cross_state_bytes,
    image_bounds,
    image_work,
    read_bytes,
    read_seconds,
)
from fovea.planner.steady import CHUNK, decode_step

BOUNDS = ("arithmetic", "memory", "fixed times")
"""The work that a stage's duration mostly comes from."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The work of one stage of a request.

    name: "encode", "prefill" or "decode".
    operations: of all its products, in the mean over a conversation.
    bytes: weights, KV and states that it reads, or reads and writes.
    seconds: duration when nothing else runs.
    bound: one of BOUNDS, or "" if there is no work.
    """

    name: str
    operations: float
    bytes: float
    seconds: float
    bound: str


@dataclass(frozen=True, slots=True)
class RequestBytes:
    """The memory that a request takes at the end of its answer.

    visual_kv, text_kv: keys and values of its visual tokens and of all its other tokens. Layers with a window
        keep their last tokens; these are divided in the same ratio.
    image_states: keys and values of image states outside of the prompt.
    states: states of layers without KV.
    encoder_outputs: rows of its images in the encoder-output cache.
    """

    visual_kv: float
    text_kv: float
    image_states: float
    states: float
    encoder_outputs: float


def request_stages(option: Option, one: PlannedKind) -> tuple[Stage, ...]:
    """Return the stages of one kind of request: encode, prefill, decode."""
    return _encode(option, one), _prefill(option, one), _decode(option, one)


def request_bytes(option: Option, one: PlannedKind) -> RequestBytes:
    """Return the memory that one kind of request takes, by kind of token."""
    setup, tokens = option.setup, one.tokens
    kv = sequence_bytes(setup, tokens.longest)
    visual = tokens.visual / tokens.longest
    rows = sum(tokens.images)
    copies = setup.devices / setup.kv_devices
    return RequestBytes(
        visual_kv=kv * visual,
        text_kv=kv * (1 - visual),
        image_states=rows * cross_state_bytes(setup) * copies,
        states=state_bytes(setup.shape, setup.precision),
        encoder_outputs=output_bytes(setup.shape, setup.precision, sum(tokens.encoder_rows)),
    )


def _encode(option: Option, one: PlannedKind) -> Stage:
    setup, tokens = option.setup, one.tokens
    works = [image_work(setup, rows) for rows in tokens.encoder_rows]
    bounds = [image_bounds(setup, work) for work in works]
    return _stage(
        "encode",
        tokens.encoded * sum(work.operations for work in works),
        tokens.encoded * sum(work.bytes for work in works),
        one.demand.encode,
        tokens.encoded * sum(arithmetic for _, arithmetic in bounds),
        tokens.encoded * sum(reading for reading, _ in bounds),
    )


def _prefill(option: Option, one: PlannedKind) -> Stage:
    setup, tokens = option.setup, one.tokens
    shape, count = setup.shape, tokens.computed
    mean = tokens.prompt - tokens.computed / 2  # tokens that one of them attends to, in the mean
    operations = count * (2 * shape.active_weights + shape.state_operations + _attention(setup, one, mean))
    chunks = max(1.0, count / CHUNK)
    read = chunks * (read_bytes(setup) + _experts(setup, min(count, CHUNK))) + sequence_bytes(
        setup, tokens.prompt
    )
    rate = setup.devices * setup.rate(setup.precision.format_of("decoder"), "prefill")
    reading = read / setup.bandwidth + chunks * _unpacking(setup)
    return _stage("prefill", operations, read, one.demand.prefill, operations / rate, reading)


def _decode(option: Option, one: PlannedKind) -> Stage:
    setup, tokens = option.setup, one.tokens
    shape, steps = setup.shape, one.demand.decodes
    each = 2 * (shape.active_weights + shape.weights("head")) + shape.state_operations
    operations = steps * (each + _attention(setup, one, tokens.context))
    read = steps * (
        read_bytes(setup)
        + _experts(setup, 1)
        + sequence_bytes(setup, tokens.context)
        + sum(tokens.images) * cross_state_bytes(setup)
        + 2 * state_bytes(shape, setup.precision)
    )
    seconds = steps * decode_step(option.cost, 1, tokens.context)
    rate = setup.devices * setup.rate(setup.precision.format_of("decoder"), "prefill")
    reading = read / setup.bandwidth + steps * _unpacking(setup)
    return _stage("decode", operations, read, seconds, operations / rate, reading)


def _unpacking(setup: Setup) -> float:
    """Seconds by which products of few rows take longer than reading their weights."""
    return read_seconds(setup) - read_bytes(setup) / setup.bandwidth


def _attention(setup: Setup, one: PlannedKind, attended: float) -> float:
    """Operations of one token with the tokens and the image states that it attends to."""
    shape = setup.shape
    own = sum(
        4 * group.count * group.heads * group.head_dim * group.seen(attended) for group in shape.attention
    )
    if shape.cross is None:
        return own
    return own + 4 * shape.cross.count * shape.cross.heads * shape.cross.head_dim * sum(one.tokens.images)


def _experts(setup: Setup, rows: float) -> float:
    """Bytes of the experts that so many rows use."""
    shape = setup.shape
    if not shape.experts:
        return 0.0
    unused = math.pow(1 - shape.active_experts / shape.experts, rows)
    return weight_bytes(shape, setup.precision).get("experts", 0) * (1 - unused)


def _stage(
    name: str, operations: float, size: float, seconds: float, arithmetic: float, reading: float
) -> Stage:
    fixed = seconds - max(arithmetic, reading)
    longest = max((arithmetic, "arithmetic"), (reading, "memory"), (fixed, "fixed times"))
    return Stage(name, operations, size, seconds, longest[1] if seconds else "")
