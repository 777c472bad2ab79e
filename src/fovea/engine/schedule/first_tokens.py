"""Predicts when a new request gets its first token, and whether that is within the target.

    expected = one step + max(work / share, wait + own work / share)

The work is the cost (`LodCost`) of the new request and of those that are served before it. The share is the
part of each second that the ITL limit leaves for prompts and images: all of it while nothing decodes. The
wait is the time until a running sequence ends if no further one may run now; else 0.

Requests that arrive later may change all of that, and steps scatter. So the ratio of actual to expected times
is measured, for requests with and without images to encode. The expected time, multiplied by the quantile of
that ratio at `target_percentile`, has to be within the target. A request that finds the engine idle is
always accepted if its own work alone is within the target: nothing would make a later try better.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fovea.engine.schedule.itl_limit import FEWEST_TOKENS, ItlLimit
from fovea.engine.schedule.plan import composition_of_decodes
from fovea.engine.schedule.policy import SHORT
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.schedule.step_times import ImageTimes, Margin, StepTimes
from fovea.engine.sequence import Sequence, Status
from fovea.planner.cost import Composition

WINDOW = 64
"""Number of latest first tokens whose ratio of actual to expected time counts."""
LEAST_SHARE = 0.05
"""Smallest share of the time that is assumed for prompts and images."""
FIRST_FACTOR = 1.25
"""Factor from expected to bounded times before the first one is measured."""
NEAR = 0.25
"""Only first tokens that were expected after this share of the target count: earlier ones have other errors,
such as the rest of a step, and no decision depends on them.
"""
INTERVALS = 16
"""Number of latest intervals between first tokens; their mean predicts the next ones."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected first token of a request.

    seconds: expected time from admission to the first token.
    factor: the asked percentage of such requests took at most this multiple of the expected time.
    cost: the request's own work.
    ahead: the work of the requests that are served before it.
    share: part of each second that is left for prompts and images, 0 to 1.
    computed: tokens of the prompt that are in the prefix cache.
    idle: whether the engine has no other request.
    short: whether a longer prompt shares each step with it.
    """

    seconds: float
    factor: float
    cost: LodCost
    ahead: LodCost
    share: float
    computed: int = 0
    idle: bool = False
    short: bool = False

    def late(self, target_s: float) -> bool:
        """Whether the first token is expected after the target. target_s: in seconds; 0: there is none."""
        if not target_s:
            return False
        return (self.cost.seconds if self.idle else self.seconds * self.factor) > target_s

    @property
    def reason(self) -> str:
        """The expectation in words."""
        return (
            f"the first token is expected after {self.seconds:.2f} s, by experience within "
            f"{self.seconds * self.factor:.2f} s; own work: {self.cost.reason}; ahead: "
            f"{self.ahead.seconds:.2f} s of encoder and prompts, which have {self.share:.0%} of the time"
        )


class FirstTokens:
    """Predicts first tokens, and learns from each of them. Thread-safe: admission asks from other threads."""

    def __init__(
        self,
        scheduler: Scheduler,
        itl_limit: ItlLimit,
        costs: LodCosts,
        most: Callable[[], int],
        target_s: float,
        factor: float | None = None,
    ) -> None:
        """scheduler, itl_limit, costs: parts of the engine.

        most: returns how many sequences may run now.
        target_s: longest time to a first token in seconds; 0 for no target.
        factor: a fixed factor from expected to bounded times, for simulations; None: it is learnt.
        """
        self._fixed = factor
        self._target_s = target_s
        self.costs = costs
        self._scheduler = scheduler
        self._itl_limit = itl_limit
        self._most = most
        percentile = itl_limit.times.margin.percentile
        kinds = itertools.product((True, False), repeat=2)  # ready, short
        self._margins = {kind: Margin(percentile, WINDOW, FIRST_FACTOR) for kind in kinds}
        self._pending: dict[str, _Pending] = {}
        self._intervals: deque[float] = deque(maxlen=INTERVALS)
        self._last: float | None = None
        self._lock = threading.Lock()

    @property
    def queued(self) -> LodCost:
        """The work before the first tokens of all requests that have none yet."""
        with self._lock:
            pending = tuple(self._pending.values())
        return total(map(self._cost, pending))

    def expect(self, seq: Sequence) -> Expectation:
        """Predict the first token of a new sequence, in which only the names of its blocks are filled in."""
        computed = self._scheduler.kv.cached_prefix(seq)
        decodes = composition_of_decodes(tuple(self._scheduler.running))
        share, step_s = self._share(decodes, len(self._pending) + 1)
        times = self._itl_limit.times
        chunk = max(FEWEST_TOKENS, times.prompt_tokens(0, share * step_s)) if decodes else math.inf
        cost = self.costs.remaining(seq, computed, chunk)
        with self._lock:
            before = tuple(self._pending.values())
        # Without a target nothing depends on the work ahead, and a queue may be long.
        pending = [self._cost(one, chunk) for one in before] if self._target_s else []
        longest_s = max((other.prompt_s for other in pending), default=0.0)
        short = self._scheduler.policy.fair and SHORT * cost.prompt_s <= longest_s
        ahead = total(pending)
        work_s = ahead.seconds + cost.seconds
        if cost.ready and not self._scheduler.policy.strict:
            work_s = _passing_s(cost.prompt_s, pending, short=short)
        return Expectation(
            step_s + max(work_s / share, self._wait_s(len(before)) + cost.seconds / share),
            self._factor(cost.ready, short),
            cost,
            ahead,
            share,
            computed,
            not before and not decodes,
            short,
        )

    def enter(self, seq: Sequence, arrival: float, expected: Expectation) -> None:
        """Count a request that was accepted, until its first token or its end. arrival: on the clock."""
        with self._lock:
            self._pending[seq.id] = _Pending(seq, arrival, expected)

    def attach(self, seq: Sequence) -> None:
        """Follow the progress of a sequence that has entered the scheduler. An unknown id is ignored."""
        with self._lock:
            one = self._pending.get(seq.id)
            if one is not None:
                one.seq = seq

    def leave(self, seq_id: str) -> None:
        """Stop counting a request. An unknown id is ignored."""
        with self._lock:
            self._pending.pop(seq_id, None)

    def rest(self) -> None:
        """Note that the engine had nothing to do: the time until the next first token does not count."""
        with self._lock:
            self._last = None

    def observe(self, seq_id: str, now: float) -> None:
        """Record a first token. now: the time on the clock of arrivals."""
        with self._lock:
            if self._last is not None:
                self._intervals.append(now - self._last)
            self._last = now
            one = self._pending.pop(seq_id, None)
            if one is not None and one.expected.seconds >= self._near_s(one.expected):
                margin = self._margins[one.expected.cost.ready, one.expected.short]
                margin.observe(one.expected.seconds, now - one.arrival)

    def _near_s(self, expected: Expectation) -> float:
        """Return the expected seconds from which on a first token counts.

        After a large factor, the requests that it lets in count, or it would stay for ever.
        """
        return self._target_s * min(NEAR, 0.5 / expected.factor)

    def _cost(self, one: _Pending, chunk_tokens: float = math.inf) -> LodCost:
        seq = one.seq
        computed = seq.computed_tokens if seq.status is Status.RUNNING else one.expected.computed
        return self.costs.remaining(seq, computed, chunk_tokens)

    def _factor(self, ready: bool, short: bool) -> float:
        return max(1.0, self._margins[ready, short].factor) if self._fixed is None else self._fixed

    def _share(self, decodes: Composition, others: int) -> tuple[float, float]:
        """Return the share of the time for prompts and images, and the seconds of a step."""
        times = self._itl_limit.times
        if not decodes:
            return 1.0, times.seconds(Composition(chunks=1, prompt_tokens=1)) if times.measured else 0.0
        allowance = self._itl_limit.allow(decodes, decodes.decodes, others)
        if not 0 < allowance.seconds < math.inf:
            return 1.0, allowance.alone
        return max(LEAST_SHARE, allowance.spare_s / allowance.seconds), allowance.seconds

    def _wait_s(self, before: int) -> float:
        """Return the seconds until a request may run. before: number of requests that are served before."""
        missing = before + 1 - max(0, self._most() - self._decoding)
        intervals = tuple(self._intervals)
        return missing * sum(intervals) / len(intervals) if missing > 0 and intervals else 0.0

    @property
    def _decoding(self) -> int:
        return sum(seq.decoding for seq in tuple(self._scheduler.running))


@dataclass(frozen=True, slots=True)
class LodCost:
    """Seconds of work before a first token, on an engine that does nothing else.

    text_s: seconds for the prompt's tokens outside of images.
    encode_s: seconds of the encoder, by the key of the image.
    visual_s: seconds for the visual tokens in the prompt, by the key of the image.
    visual_tokens: number of the visual tokens that are not computed yet.
    prompt_tokens: number of all tokens of the prompt that are not computed yet.
    """

    text_s: float = 0.0
    encode_s: dict[str, float] = field(default_factory=dict)
    visual_s: dict[str, float] = field(default_factory=dict)
    visual_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def ready(self) -> bool:
        """Whether no image remains to be encoded."""
        return not self.encode_s

    @property
    def prompt_s(self) -> float:
        """Seconds of the whole prompt, without the encoder."""
        return self.text_s + sum(self.visual_s.values())

    @property
    def seconds(self) -> float:
        """Seconds of encoder and prompt."""
        return self.prompt_s + sum(self.encode_s.values())

    @property
    def reason(self) -> str:
        """The cost in words."""
        return (
            f"images to encode: {len(self.encode_s)}, in {sum(self.encode_s.values()):.2f} s; "
            f"tokens of the prompt: {self.prompt_tokens}, {self.visual_tokens} of them visual, "
            f"in {self.prompt_s:.2f} s"
        )


def total(costs: Iterable[LodCost]) -> LodCost:
    """Return the cost of several requests together. An image that several of them need counts once."""
    text_s, visual_tokens, prompt_tokens = 0.0, 0, 0
    encode_s: dict[str, float] = {}
    visual_s: dict[str, float] = {}
    for cost in costs:
        text_s += cost.text_s
        encode_s |= cost.encode_s
        visual_s |= cost.visual_s
        visual_tokens += cost.visual_tokens
        prompt_tokens += cost.prompt_tokens
    return LodCost(text_s, encode_s, visual_s, visual_tokens, prompt_tokens)


class LodCosts:
    """Tells the costs of requests, by the predictions that the engine has learnt.

    The number of tokens does not tell the cost: an image of 1024 visual tokens may take forty times as long
    as a question in the encoder, and nothing if it is cached. The cost counts only what remains to be
    computed. Requests that wait for the same image share its part, so the cost keeps the parts of images
    apart, by their keys.

    times, images: predict durations.
    encoded: tells whether the encoder output of an image is in the cache, by its key.
    """

    def __init__(self, times: StepTimes, images: ImageTimes, encoded: Callable[[str], bool]) -> None:
        self.times = times
        self.images = images
        self.encoded = encoded

    def remaining(self, seq: Sequence, computed: int, chunk_tokens: float = math.inf) -> LodCost:
        """Return the cost of what remains of a sequence's prompt. Zero before the first measured step.

        computed: tokens of the prompt that are computed, or will be found in the prefix cache.
        chunk_tokens: tokens of a chunk; every chunk has a fixed cost. At least 1.
        """
        left = len(seq.prompt_ids) - computed
        if left <= 0 or not self.times.measured:
            return LodCost()
        encode_s: dict[str, float] = {}
        visual_s: dict[str, float] = {}
        visual = 0
        prompt_s = self.times.prompt_s(computed, left) + left // chunk_tokens * self.times.chunk_s
        token_s = 0.0 if seq.encode_only else prompt_s / left
        for span in seq.spans:
            if span.end <= computed and not seq.encode_only:
                continue
            if not self.encoded(span.key):
                encode_s[span.key] = self.images.seconds(span.encoder_rows)
            tokens = span.end - max(span.start, computed)
            visual += tokens
            visual_s[span.key] = visual_s.get(span.key, 0.0) + tokens * token_s
        return LodCost((left - visual) * token_s, encode_s, visual_s, visual, left)


@dataclass(slots=True)
class _Pending:
    """A request without a first token: its sequence, arrival in seconds, expectation."""

    seq: Sequence
    arrival: float
    expected: Expectation


def _passing_s(own_s: float, pending: Iterable[LodCost], *, short: bool) -> float:
    """Return the seconds of work until a request that needs no encoder has its first token.

    It passes the requests whose image is encoded after its turn has come. As long as there are images,
    prompts and the encoder have half of the time each.

    own_s: seconds of its prompt. pending: the requests before it, in order.
    short: it shares each step with longer prompts, see `Policy`: half of the time is for it and shorter ones.
    """
    prompts_s, encode_s, shorter_s = own_s, 0.0, own_s
    images = []
    for cost in pending:
        if cost.ready:
            prompts_s += cost.prompt_s
            shorter_s += cost.prompt_s if cost.prompt_s <= own_s else 0.0
        else:
            images.append(cost)
    for cost in images:
        encode_s += sum(cost.encode_s.values())
        if encode_s <= prompts_s:
            prompts_s += cost.prompt_s
    if short:
        prompts_s = min(prompts_s, 2 * shorter_s)
    return prompts_s + min(encode_s, prompts_s)
