"""Speed of one replica under a steady load, by formulas.

A replica works on one step at a time. With b sequences that decode, a decode step takes s(b). A request has
D decodes. Its images and its prompt add F(b) busy seconds, in chunks beside the decodes of others. On a GPU a
chunk hides behind the reading of the weights, so that F(b) is shorter than the same work alone.

    Little's law  b = r D gap and gap = s / (1 - r F): of the time, a share r F goes to images and prompts. So
                  the rate at which b sequences decode is r(b) = b / (D s + b F)
    open          requests come independently of each other: one that decodes sees b others, so s = s(1 + b)
    closed        n clients wait for their answers: n = b + waiting + r * preparation, and s = s(b)
    waiting       the first tokens that are waited for are a queue with one server (M/G/1, Pollaczek and
                  Khinchine), whose service is F(b) over the share of a step that prompts get beside decodes
    that share    1 - 1 / pace, and more when many wait: the rules of `engine.schedule.itl_limit`

The simulator plays the same load with the engine's own scheduler; `cli.plan` compares both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fovea.planner.cost import Composition, CostModel
from fovea.planner.workload import Tokens

CHUNK = 1024
"""Tokens of a prompt that one step computes when nothing decodes, at most."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Busy seconds of one request, and the tokens that they depend on.

    prepare: before the engine: reading the request, decoding and resizing its images.
    encode: the images that are not cached.
    prefill: the tokens without cached KV, in steps without decodes.
    tokens: tokens that are sampled one by one.
    context: tokens that a decode attends to, in the mean.
    prompt: the tokens without cached KV.
    pairs: pairs of such a token and a token that it attends to.
    """

    prepare: float = 0.0
    encode: float = 0.0
    prefill: float = 0.0
    tokens: float = 0.0
    context: float = 0.0
    prompt: float = 0.0
    pairs: float = 0.0

    @property
    def first(self) -> float:
        """Busy seconds before the first token, without the preparation."""
        return self.encode + self.prefill

    @property
    def decodes(self) -> float:
        """Steps of decoding: the prompt's last step samples the first token."""
        return max(FEWEST_DECODES, self.tokens - 1)


FEWEST_DECODES = 1e-3
"""Decodes of a request whose answer is one token: not 0, because rates are found from decodes."""
Mix = list[tuple[float, Demand]]
"""Kinds of requests with their shares of all requests, which add up to 1."""


def demand(
    cost: CostModel, tokens: Tokens, *, pixels: float = 0.0, request_s: float = 0.0, pixel_s: float = 0.0
) -> Demand:
    """Return the busy seconds of a request.

    pixels: of its images. request_s, pixel_s: seconds of preparation per request and per pixel.
    """
    encode = tokens.encoded * sum(cost.image(rows) for rows in tokens.encoder_rows)
    start = max(0.0, tokens.prompt - tokens.computed)
    prefill, left, position = 0.0, tokens.computed, start
    while left > 0:
        chunk = min(left, CHUNK)
        pairs = _pairs(position, chunk)
        prefill += cost.step(Composition(0, 0, math.ceil(chunk), 1, round(pairs))) + cost.between_s
        left, position = left - chunk, position + chunk
    prepare = request_s + pixel_s * pixels * (tokens.encoded if tokens.images else 0.0)
    return Demand(
        prepare, encode, prefill, tokens.chosen, tokens.context, tokens.computed,
        _pairs(start, tokens.computed),
    )  # fmt: skip


def mean_demand(parts: Mix) -> Demand:
    """Return the mean of demands, weighted by shares that add up to 1. Contexts are weighted by tokens."""

    def mean(name: str) -> float:
        return sum(share * float(getattr(one, name)) for share, one in parts)

    context = sum(share * one.tokens * one.context for share, one in parts) / mean("tokens")
    names = ("prepare", "encode", "prefill", "tokens", "prompt", "pairs")
    return Demand(context=context, **{name: mean(name) for name in names})


def _pairs(start: float, count: float) -> float:
    return count * start + count * (count + 1) / 2


PACE = 2.5
"""Longest step beside decodes, in steps that only decode: the default of the engine's setting `pace`."""
FREE_BATCH, CROWDING = 4, 0.5
"""How that grows with the requests that wait: see `engine.schedule.itl_limit`."""
SMALLEST_CHUNK, LARGEST_CHUNK = 16, 2048
DEAREST = 2.0
"""Largest cost of a prompt in chunks, through its cost in one piece. Small chunks of models with experts read
nearly all weights each, and then requests wait for each other and share larger chunks: on the simulator two
to 32 clients of such a model pay up to about this much."""
SLOWEST_RATE = 1e-6
"""Requests per second at which no request waits for another."""
RATE_STEP, RATE_STEPS = 0.03, 100
"""Share by which a rate is lowered if it misses the targets after all, and how often."""
HALVINGS = 48
"""Halvings of an interval in a search."""
MOST_WAITING = 1e5
"""Requests that wait: with more, they become ever more."""


def decode_step(cost: CostModel, batch: float, context: float) -> float:
    """Return the seconds from one token to the next of a batch that only decodes."""
    low = max(1, math.floor(batch))
    below, above = (step_seconds(cost, count, context) for count in (low, low + 1))
    return below + (above - below) * max(0.0, batch - low)


def step_seconds(cost: CostModel, batch: int, context: float, prompt: int = 0, pairs: float = 0.0) -> float:
    """Return the seconds of a step with so many decodes, and `prompt` tokens of a prompt beside them.

    context: tokens that a decode attends to. pairs: pairs of a prompt token and one that it attends to.
    """
    made_of = Composition(batch, round(batch * context), prompt, 1 if prompt else 0, round(prompt * pairs))
    return cost.step(made_of) + cost.between_s


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed that clients of one replica see.

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


def closed(cost: CostModel, mix: Mix, clients: int) -> Speed:
    """Return the speed with so many clients. Each sends its next request after its answer.

    Percentiles are not known for clients that wait: `ttft_p_s` and `itl_p_s` are the means.
    """
    mean = mean_demand(mix)
    if clients == 1:
        gap, ttft = decode_step(cost, 1, mean.context), mean.prepare + mean.first
        whole = ttft + mean.decodes * gap
        busy = 1 - mean.prepare / whole
        return Speed(1.0, 1 / whole, mean.tokens / whole, ttft, ttft, gap, gap, busy, 0.0)

    def state(batch: float) -> _State:
        return _state(cost, mix, mean, batch, clients)

    def missing(batch: float) -> float:
        now = state(batch)
        return clients - batch - now.rate * (mean.prepare + now.service + now.queue)

    batch = _root(missing, 0.0, float(clients))
    now = state(batch)
    # All clients are somewhere: what does not decode waits for its first token.
    ttft = clients / now.rate - mean.decodes * now.gap
    wait = max(0.0, ttft - mean.prepare - now.service)
    return Speed(batch, now.rate, now.rate * mean.tokens, ttft, ttft, now.gap, now.gap, 1.0, wait)


def open_load(
    cost: CostModel, mix: Mix, rate: float, max_running: int, percentile: float = 95
) -> Speed | None:
    """Return the speed under a load of so many requests/s; None: the replica cannot keep up.

    Arrivals are independent of each other (Poisson).

    max_running: most sequences at once.
    percentile: for `ttft_p_s` and `itl_p_s`, in percent.
    """
    mean = mean_demand(mix)
    batch = _root(lambda batch: rate - _state(cost, mix, mean, batch).rate, 0.0, float(max_running))
    speed = _speed(cost, mix, mean, batch, percentile)
    return None if speed.requests_per_s < rate * (1 - 1e-6) or math.isinf(speed.ttft_s) else speed


def most_rate(
    cost: CostModel,
    mix: Mix,
    max_running: int,
    *,
    ttft_s: float = 0.0,
    itl_s: float = 0.0,
    percentile: float = 95,
) -> float:
    """Return the highest rate, in requests/s, at which one replica meets the targets; 0: it never does.

    ttft_s, itl_s: targets at the percentile; 0: none.
    """
    mean = mean_demand(mix)

    def late(speed: Speed | None) -> bool:
        if speed is None or math.isinf(speed.ttft_s):
            return True
        return bool(ttft_s and speed.ttft_p_s > ttft_s) or bool(itl_s and speed.itl_p_s > itl_s)

    def exceeds(batch: float) -> float:
        return -1.0 if late(_speed(cost, mix, mean, batch, percentile)) else 1.0

    if not max_running or exceeds(SLOWEST_RATE * mean.decodes * decode_step(cost, 1, mean.context)) < 0:
        return 0.0
    rate = _state(cost, mix, mean, _root(exceeds, 0.0, float(max_running), below=True)).rate
    # Batches are whole numbers, so times are not strictly monotone: the rate itself has to meet the targets.
    for _ in range(RATE_STEPS):
        if not late(open_load(cost, mix, rate, max_running, percentile)):
            return rate
        rate *= 1 - RATE_STEP
    return 0.0


@dataclass(frozen=True, slots=True)
class _State:
    """The state of a replica that follows from the number of sequences that decode.

    rate: requests per second. gap: seconds between tokens.
    share: of a step beside decodes that images and prompts get.
    service: seconds of images and prompt of one request, without a queue.
    load: share of the time in which images and prompts are computed.
    queue: seconds behind the images and prompts of others; infinite: the queue grows without end.
    """

    rate: float
    gap: float
    share: float
    service: float
    load: float
    queue: float


def _state(cost: CostModel, mix: Mix, mean: Demand, batch: float, clients: int = 0) -> _State:
    """The state in which `batch` sequences decode in the mean.

    clients: so many clients wait for their answers; 0: requests come independently of each other.
    """
    decoding = min(1.0, batch) if clients else 1 - math.exp(-batch)
    seen = batch if clients else 1 + batch
    step = decode_step(cost, seen, mean.context)
    prompt, chunks = _beside(cost, mean, max(1, round(seen)), batch)
    beside = mean.encode + prompt
    spread = sum(share * one.first**2 for share, one in mix) / max(1e-18, mean.first**2)
    others = (clients - 1) / clients if clients else 1.0

    def rate(waiting: float) -> float:
        alone = mean.decodes * step
        stretched = alone + batch * beside
        if not clients:
            # Prompts in the queue behind a request that begins to decode stretch its gaps, but
            # not beyond the share of each step that they get.
            longest = alone / (1 - _share(waiting, batch))
            stretched = max(stretched, min(longest, stretched + waiting * beside))
        return batch / stretched

    def load(waiting: float) -> float:
        busy = (1 - decoding) * mean.first + decoding * beside / _share(waiting, batch)
        return rate(waiting) * busy

    def missing(waiting: float) -> float:
        share = load(waiting)
        return share + others * spread * share**2 / (2 * (1 - share)) - waiting if share < 1 else 1.0

    waiting = _root(missing, 0.0, MOST_WAITING)
    now, share = rate(waiting), _share(waiting, batch)
    gap = batch / now / mean.decodes
    # Beside decodes, an image gets its share of each step, and a prompt takes whole steps. Both begin with
    # the next step, half a step later in the mean; a prompt with an image begins a step after it.
    slow = mean.encode / share + chunks * step + prompt + gap * (1.5 if mean.encode else 0.5)
    return _State(
        rate=now,
        gap=gap,
        share=share,
        service=(1 - decoding) * mean.first + decoding * slow,
        load=load(waiting),
        queue=math.inf if waiting >= MOST_WAITING else max(0.0, waiting - load(waiting)) / now,
    )


def _share(waiting: float, batch: float) -> float:
    """Share of a step that images and prompts get beside decodes, by the engine's rule."""
    crowd = max(1.0, (waiting - 1) / max(1.0, batch / FREE_BATCH))
    return 1 - 1 / (PACE * math.pow(crowd, CROWDING))


def _beside(cost: CostModel, mean: Demand, seen: int, batch: float) -> tuple[float, float]:
    """Seconds that a prompt adds to steps in which `seen` sequences decode, and the number of these steps."""
    if not mean.prompt:
        return 0.0, 0.0
    alone = step_seconds(cost, seen, mean.context)
    pairs = mean.pairs / mean.prompt

    def added(chunk: int) -> float:
        return step_seconds(cost, seen, mean.context, chunk, pairs) - alone

    # Chunks are as large as the ITL limit allows, and at least as large as the steps of decoding are few.
    low = max(SMALLEST_CHUNK, math.ceil(mean.prompt * batch / mean.decodes))
    high = max(low, min(LARGEST_CHUNK, math.ceil(mean.prompt)))
    while high - low > 8:
        middle = (low + high) // 2
        low, high = (middle, high) if added(middle) < (PACE - 1) * alone else (low, middle)
    chunk = min(low, math.ceil(mean.prompt))
    chunks = mean.prompt / chunk
    seconds = chunks * added(chunk)
    if seconds > DEAREST * mean.prefill:
        chunks, seconds = chunks * DEAREST * mean.prefill / seconds, DEAREST * mean.prefill
    # A prompt hides behind decodes only as far as there are any.
    hidden = mean.decodes / batch * alone if batch else math.inf
    return max(seconds, mean.prefill - hidden), chunks


def _speed(cost: CostModel, mix: Mix, mean: Demand, batch: float, percentile: float) -> Speed:
    """The speed of independent arrivals, when `batch` of them decode in the mean."""
    now = _state(cost, mix, mean, batch)
    rest = 1 - percentile / 100
    # A request waits with the probability `load`, and then for a time that is nearly exponential.
    slow = now.queue / now.load * math.log(now.load / rest) if now.load > rest else 0.0
    slower = now.service / mean.first if mean.first else 1.0
    covered, longest = 0.0, 0.0
    for seconds, share in sorted((one.prepare + one.first * slower, share) for share, one in mix):
        covered, longest = covered + share, seconds
        if covered >= 1 - rest - 1e-9:
            break
    ttft = mean.prepare + now.service + now.queue
    # Beside a prompt or an image, a step lasts longer.
    gap_p = decode_step(cost, 1 + batch, mean.context) / (1 - now.share if now.load > rest else 1)
    return Speed(
        batch, now.rate, now.rate * mean.tokens, ttft, max(ttft, longest + slow), now.gap,
        max(now.gap, gap_p), _busy(now.load, batch), now.queue,
    )  # fmt: skip


def _busy(load: float, batch: float) -> float:
    """Share of the time in which a replica has a request: one that waits, or one that decodes."""
    return 1 - (1 - min(1.0, load)) * math.exp(-batch)


def _root(falling: Callable[[float], float], low: float, high: float, *, below: bool = False) -> float:
    """Return where a falling function crosses 0, or `high` if it does not.

    below: return the lower bound, where the function is certainly positive.
    """
    if falling(high) > 0:
        return high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return low if below else high
