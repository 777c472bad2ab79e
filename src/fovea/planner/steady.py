"""Speed of one replica under a steady load, by formulas.

A replica works on one step at a time. Of its time, a request takes E for its images, P for the prompt, and
for each token of the answer its part of a decode step, s(b) / b with b sequences in the batch:

    work(b)   = E + P + tokens * s(b) / b                 busy seconds of one request
    closed    n clients that wait for answers: b is about n, and the throughput 1 / work(n)
    open      r requests/s: b follows from Little's law, b = r * tokens * gap(b), where a gap is a decode step
              stretched by the encoding and the prompts of others: gap(b) = s(b) / (1 - r * (E + P))
    waiting   for the encoder and the prompt as in a queue with one server and the mean work E + P, whose
              service is stretched by the decodes between its slices (M/G/1, Pollaczek and Khinchine)

The simulator plays the same load with the engine's own scheduler; `cli.plan` compares both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fovea.planner.composition import Composition
from fovea.planner.cost import CostModel
from fovea.planner.workload import Tokens

PROMPT_SHARE = 0.6
"""Share of a step that encoding and prompts get beside decodes: with the default pace of 2.5, 1.5 of 2.5."""
CHUNK = 1024
"""Tokens of a prompt that one step computes when nothing decodes, at most."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Busy seconds of one request.

    prepare: before the engine: reading the request, decoding and resizing its images.
    encode: the images that are not cached.
    prefill: the tokens without cached KV.
    tokens: tokens that are sampled one by one.
    context: tokens that a decode attends to, in the mean.
    """

    prepare: float
    encode: float
    prefill: float
    tokens: float
    context: float

    @property
    def first(self) -> float:
        """Busy seconds before the first token, without the preparation."""
        return self.encode + self.prefill


def demand(
    cost: CostModel, tokens: Tokens, *, pixels: float = 0.0, request_s: float = 0.0, pixel_s: float = 0.0
) -> Demand:
    """Return the busy seconds of a request.

    pixels: of its images. request_s, pixel_s: seconds of preparation per request and per pixel.
    """
    encode = tokens.encoded * sum(cost.image(image) for image in tokens.images)
    start = max(0.0, tokens.prompt - tokens.computed)
    prefill, left, position = 0.0, tokens.computed, start
    while left > 0:
        chunk = min(left, CHUNK)
        pairs = chunk * position + chunk * (chunk + 1) / 2
        prefill += cost.step(Composition(0, 0, round(chunk), 1, round(pairs))) + cost.between_s
        left, position = left - chunk, position + chunk
    prepare = request_s + pixel_s * pixels * (tokens.encoded if tokens.images else 0.0)
    return Demand(prepare, encode, prefill, tokens.chosen, tokens.context)


def mean_demand(parts: list[tuple[float, Demand]]) -> Demand:
    """Return the mean of demands, weighted by shares that add up to 1."""
    return Demand(
        sum(share * one.prepare for share, one in parts),
        sum(share * one.encode for share, one in parts),
        sum(share * one.prefill for share, one in parts),
        sum(share * one.tokens for share, one in parts),
        sum(share * one.tokens * one.context for share, one in parts)
        / max(1e-9, sum(share * one.tokens for share, one in parts)),
    )


def decode_step(cost: CostModel, batch: float, context: float) -> float:
    """Return the seconds from one token to the next of a batch that only decodes."""
    low = math.floor(batch)
    below, above = (_step(cost, max(1, count), context) for count in (low, low + 1))
    return below + (above - below) * (batch - low)


def _step(cost: CostModel, batch: int, context: float) -> float:
    return cost.step(Composition(decodes=batch, decode_context=round(batch * context))) + cost.between_s


@dataclass(frozen=True, slots=True)
class Speed:
    """What clients of one replica see.

    batch: sequences that decode at the same time, in the mean.
    requests_per_s, tokens_per_s: answers and their tokens.
    ttft_s: time to the first token, in the mean; `ttft_p_s`: at the percentile of the targets.
    itl_s: time between tokens, in the mean; `itl_p_s`: at the percentile.
    busy: share of the time in which the replica computes.
    waiting_s: of `ttft_s`, the time in queues.
    """

    batch: float
    requests_per_s: float
    tokens_per_s: float
    ttft_s: float
    ttft_p_s: float
    itl_s: float
    itl_p_s: float
    busy: float
    waiting_s: float

    @property
    def latency_s(self) -> float:
        """Seconds of a whole answer, in the mean."""
        tokens = self.tokens_per_s / self.requests_per_s if self.requests_per_s else 0.0
        return self.ttft_s + max(0.0, tokens - 1) * self.itl_s


def closed(cost: CostModel, mix: list[tuple[float, Demand]], clients: int) -> Speed:
    """Return the speed with so many clients, each of which sends its next request after its answer.

    Percentiles are not known of clients that wait: `ttft_p_s` and `itl_p_s` are the means.
    """
    mean = mean_demand(mix)
    step = decode_step(cost, 1, mean.context)
    if clients == 1:
        whole = mean.prepare + mean.first + mean.tokens * step
        ttft = mean.prepare + mean.first
        busy = 1 - mean.prepare / whole
        return Speed(1.0, 1 / whole, mean.tokens / whole, ttft, ttft, step, step, busy, 0.0)
    batch = float(clients)
    for _ in range(100):
        step = decode_step(cost, batch, mean.context)
        rate = 1 / (mean.first + mean.tokens * step / batch)
        share = min(PROMPT_SHARE, rate * mean.first)
        if share == PROMPT_SHARE:  # more prompts wait than the decodes leave time for
            rate = PROMPT_SHARE / mean.first
            wanted = rate * mean.tokens * step / (1 - PROMPT_SHARE)
        else:
            wanted = clients - rate * (mean.prepare + mean.first / PROMPT_SHARE)
        batch = 0.5 * batch + 0.5 * min(float(clients), max(1.0, wanted))
    gap = step / (1 - share)
    ttft = max(mean.prepare + mean.first, clients / rate - mean.tokens * gap)
    wait = max(0.0, ttft - mean.prepare - mean.first)
    return Speed(batch, rate, rate * mean.tokens, ttft, ttft, gap, gap, 1.0, wait)


def open_load(
    cost: CostModel, mix: list[tuple[float, Demand]], rate: float, room: int, percentile: float = 95
) -> Speed | None:
    """Return the speed under a load of so many requests/s; None: the replica cannot keep up.

    Arrivals are independent of each other (Poisson).

    room: most sequences at once.
    percentile: for `ttft_p_s` and `itl_p_s`, in percent.
    """
    mean = mean_demand(mix)
    first = rate * mean.first
    batch = _batch(cost, mean, rate, room)
    if first >= 1 or batch is None:
        return None
    step = decode_step(cost, max(1.0, batch), mean.context)
    gap = step / (1 - first)
    decoding = min(1.0, batch)
    # Encoding and prompts advance beside decodes with a part of each step's time.
    slowed = 1 - decoding * (1 - PROMPT_SHARE)
    spread = sum(share * one.first**2 for share, one in mix) / max(1e-18, mean.first**2)
    load = first / slowed
    if load >= 1:
        return None
    wait = mean.first / slowed * load * spread / (2 * (1 - load))
    ttft = mean.prepare + mean.first / slowed + wait
    tail = math.log(1 / (1 - percentile / 100))
    slowest = sorted((one.prepare + one.first / slowed, share) for share, one in mix)
    covered, longest = 0.0, 0.0
    for seconds, share in slowest:
        covered, longest = covered + share, seconds
        if covered >= percentile / 100 - 1e-9:
            break
    # A step beside a prompt or an image lasts 1 / (1 - PROMPT_SHARE) of one that only decodes.
    late = first > 1 - percentile / 100
    gap_p = step / (1 - PROMPT_SHARE) if late else step
    busy = min(1.0, first + rate * mean.tokens * step / max(1.0, batch))
    return Speed(
        batch, rate, rate * mean.tokens, ttft, longest + wait * tail, gap, max(gap, gap_p), busy, wait
    )


def _batch(cost: CostModel, mean: Demand, rate: float, room: int) -> float | None:
    """The number of decoding sequences by Little's law; None: more than `room` would be needed."""
    free = 1 - rate * mean.first
    if free <= 0:
        return None

    def missing(batch: float) -> float:
        return rate * mean.tokens * decode_step(cost, max(1.0, batch), mean.context) / free - batch

    low, high = 0.0, float(room)
    if missing(high) > 0:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if missing(middle) > 0 else (low, middle)
    return high


def most_rate(
    cost: CostModel,
    mix: list[tuple[float, Demand]],
    room: int,
    *,
    ttft_s: float = 0.0,
    itl_s: float = 0.0,
    percentile: float = 95,
) -> float:
    """Return the highest rate, in requests/s, at which one replica meets the targets; 0: it never does.

    ttft_s, itl_s: targets at the percentile; 0: none.
    """

    def meets(rate: float) -> bool:
        speed = open_load(cost, mix, rate, room, percentile)
        return (
            speed is not None
            and (not ttft_s or speed.ttft_p_s <= ttft_s)
            and (not itl_s or speed.itl_p_s <= itl_s)
        )

    low, high = 0.0, 1 / max(1e-9, mean_demand(mix).first) + 1
    if not room or not meets(1e-6):
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low
