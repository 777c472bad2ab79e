"""The memory of one replica: weights, caches, and how many requests fit into the rest."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.planner.memory import state_bytes, weight_bytes
from fovea.planner.roofline import Setup, cross_state_bytes
from fovea.planner.workload import Tokens

WORK_SHARE = 0.05
"""Share of the memory for activations, buffers of kernels and the process itself."""
ENCODER_CACHE_SHARE = 0.02
"""Share of the memory for the outputs of the encoder, unless the working set is smaller."""


TOWER = ("encoder", "patches", "merged", "projector")
"""Parts of the vision tower. Every device of a replica has a copy of them."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes of a replica's memory, all its devices together.

    total: usable memory of the devices.
    weights: of the model, by part.
    work: activations and buffers.
    encoder_cache: outputs of the encoder.
    states: states of layers without KV, of all requests that fit.
    kv: the rest, for keys, values and states.
    request_bytes: KV and states of one request of the mix, at the end of its answer.
    requests: requests that fit at once.
    """

    total: int
    weights: dict[str, int]
    work: int
    encoder_cache: int
    states: int
    kv: int
    request_bytes: float
    requests: int

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())


def sequence_bytes(setup: Setup, tokens: float) -> float:
    """Return the bytes of KV of a sequence, on all devices together, copies included.

    Layers with a window keep only that window.
    """
    one = sum(
        group.kv_bytes_per_token(setup.precision.kv_itemsize(group.head_dim)) * group.seen(tokens)
        for group in setup.shape.attention
    )
    return one * setup.devices / setup.kv_devices


def capacity(setup: Setup, mix: list[tuple[float, Tokens]], working_set: int | None = None) -> Capacity:
    """Return how the memory of a replica is divided.

    Requests are counted with KV of their own; prefixes that they share make room for more.

    mix: share and tokens of each kind of request. The shares add up to 1.
    working_set: bytes of encoder outputs that other requests will ask for again; None: not known.
    """
    shape, precision = setup.shape, setup.precision
    total = setup.hardware.usable_bytes * setup.devices
    weights = dict(weight_bytes(shape, precision))
    tower = sum(weights.get(part, 0) for part in TOWER)
    weights["encoder"] = weights.get("encoder", 0) + tower * (setup.devices - 1)  # the tower is not split
    state = state_bytes(shape, precision)
    own = sum(share * sequence_bytes(setup, tokens.longest) for share, tokens in mix)
    copies = setup.devices / setup.kv_devices
    own += sum(share * sum(tokens.images) for share, tokens in mix) * cross_state_bytes(setup) * copies
    request = own + state
    work = round(total * WORK_SHARE)
    cache = round(total * ENCODER_CACHE_SHARE)
    if working_set is not None:
        cache = min(cache, working_set)
    left = max(0, total - sum(weights.values()) - work - cache)
    requests = int(left / request)
    return Capacity(total, weights, work, cache, round(requests * state), left, request, requests)
