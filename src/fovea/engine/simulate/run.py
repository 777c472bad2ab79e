"""Runs a trace through the real scheduler on a virtual clock: thousands of requests in seconds.

The clock jumps to the end of the step or, if there is nothing to do, to the next arrival. Requests that
arrive during a step are added after it, as in the engine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fovea.core.errors import EngineError, Overloaded
from fovea.core.sampling import SamplingParams
from fovea.core.trace import TEXT_BITS, Trace, TraceRequest
from fovea.engine.config import EngineConfig
from fovea.engine.job import SequenceInputs
from fovea.engine.request.admission import FirstTokenGate
from fovea.engine.schedule.itl_limit import BatchControl
from fovea.engine.schedule.policy import Policy
from fovea.engine.sequence import ImageSpan
from fovea.engine.sequence import Sequence as TokenSequence
from fovea.engine.simulate.assemble import Oracle, context_limit, simulated_stepper
from fovea.engine.simulate.executor import CostExecutor, NoiseSettings
from fovea.engine.simulate.report import KINDS, ClassReport, Record, Report
from fovea.engine.step.stepper import Step, Stepper
from fovea.engine.visual_budget.detail import SHARES_UNDER_LOAD
from fovea.planner.cost import CostModel

IMAGE_ID = -1
"""The token that stands for an image; text has other ids."""
SAMPLING = SamplingParams(temperature=0.0)
STALL_S = 0.002
"""Pause of the engine's loop after a step in which nothing could advance."""
MOST_STALLS = 100_000
"""This many empty steps in a row are a defect of the scheduler and no mere waiting."""


def simulate(
    trace: Trace,
    config: EngineConfig,
    cost: CostModel,
    policy: Policy | None = None,
    *,
    control: BatchControl | None = None,
    bounds: Bounds | None = None,
    following: Mapping[int, Next] | None = None,
    prepare: Callable[[TraceRequest], float] | None = None,
    noise: NoiseSettings | None = None,
    oracle: Oracle | None = None,
    warm_up: int = 0,
) -> Report:
    """Serve a trace to its end.

    As in the engine, a request that can never fit is refused, and so is one that finds the queue full.

    trace: in order of arrival.
    following: the request that a client sends after its request of that number has ended.
    prepare: seconds from the arrival of a request until the engine may schedule it, for reading its images
        and its text. None: no time.
    policy, control: None: those of the configuration.
    bounds: bounds of a good answer; None: the defaults.
    noise: disturbs durations of steps; None: they last exactly as long as the cost model says.
    oracle: knows the costs of steps in advance; None: they are learnt, as in the engine.
    warm_up: number of requests at the beginning of the trace that are served but not reported. The
        counters of the engine and its caches include them.
    Raises EngineError when no sequence can advance any more.
    """
    stepper = simulated_stepper(
        config,
        cost,
        lambda embeddings: CostExecutor(cost, embeddings, lambda seq: len(seq.output_ids), noise),
        policy=policy,
        control=control,
        oracle=oracle,
    )
    run = Run(trace, config, cost, stepper, following or {}, prepare or at_once)
    run.send_all()
    run.to_the_end()
    return report_of([run], run.records, trace, bounds or Bounds(), warm_up)


def simulated_records(
    trace: Trace,
    config: EngineConfig,
    cost: CostModel,
    *,
    following: Mapping[int, Next] | None = None,
    prepare: Callable[[TraceRequest], float] | None = None,
) -> list[Record]:
    """Serve a trace to its end, and return the record of each request, in the order of the trace.

    The engine has served the same trace before, so that it knows how long its steps take; its caches are
    empty all the same. Arguments and errors as for `simulate`.
    """
    learnt: Stepper | None = None
    for _ in range(2):
        stepper = simulated_stepper(
            config,
            cost,
            lambda embeddings: CostExecutor(cost, embeddings, lambda seq: len(seq.output_ids)),
            learnt=learnt,
        )
        run = Run(trace, config, cost, stepper, following or {}, prepare or at_once)
        run.send_all()
        run.to_the_end()
        learnt = stepper
    return run.records


def to_sequence(
    request: TraceRequest,
    number: int,
    before: TokenSequence | None = None,
    arrival: float | None = None,
    steps_down: int = 0,
) -> TokenSequence:
    """Return a sequence with the request's system prompt, images and text, in this order.

    number: number of the request in its trace. It is the sequence's id, and makes its text unique.
    before: an ended sequence whose prompt and answer come first; None: nothing does.
    arrival: when the client sent it; None: at `request.at`.
    steps_down: 1 or 2: images keep a part of their visual tokens, as images do under load.
    """
    arrival = request.at if arrival is None else arrival
    ids, spans = list(range(request.system)), list[ImageSpan]()
    if before is not None:
        ids, spans = [*before.prompt_ids, *before.output_ids], list(before.spans)
    share = (1.0, *SHARES_UNDER_LOAD)[steps_down]
    for whole, all_tokens in request.images:
        tokens = max(1, int(share * all_tokens))
        key = whole if tokens == all_tokens else f"{whole}, {tokens} tokens"
        spans.append(ImageSpan(len(spans), len(ids), tokens, tokens, key, (1, 2, 2 * tokens)))
        ids += [IMAGE_ID] * tokens
    first = (number + 1) << TEXT_BITS
    ids += range(first, first + request.text)
    return TokenSequence(
        id=str(number),
        prompt_ids=ids,
        sampling=SAMPLING,
        max_tokens=request.output,
        spans=tuple(spans),
        arrival=arrival,
        deadline=None if request.timeout is None else arrival + request.timeout,
        priority=request.priority,
    )


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a good answer.

    ttft_s: seconds to the first token.
    itl_s: mean seconds per further token.
    """

    ttft_s: float = 1.0
    itl_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Next:
    """A request that a client sends after another one.

    number: its number in the trace. Its `at` counts from the end of the other.
    continues: its prompt begins with the other's prompt and answer.
    """

    number: int
    continues: bool = False


def at_once(request: TraceRequest) -> float:
    """Take no time before the engine may schedule a request."""
    return 0.0


class Run:
    """One engine that serves requests of a trace.

    records: of all requests of the trace, in its order; those that go to other engines stay empty.
    now: the virtual clock, in seconds.
    busy: seconds in which a step ran.
    """

    def __init__(
        self,
        trace: Trace,
        config: EngineConfig,
        cost: CostModel,
        stepper: Stepper,
        following: Mapping[int, Next],
        prepare: Callable[[TraceRequest], float],
    ) -> None:
        self.cost = cost
        self.stepper = stepper
        self.trace = trace
        self._following = following
        self._prepare = prepare
        self.records = [Record(request.at) for request in trace]
        self.max_in_flight = config.schedule.max_in_flight or math.inf
        self.gate = FirstTokenGate(stepper.first_tokens, config.schedule)
        self.context = context_limit(config, cost)
        self.now = 0.0
        self.busy = 0.0
        self._stalls = 0
        self._ended: dict[int, TokenSequence] = {}
        self._arrivals: list[tuple[float, int]] = []

    def send_all(self) -> None:
        """Let clients send all requests of the trace that do not follow another one."""
        later = {follower.number for follower in self._following.values()}
        for number, request in enumerate(self.trace):
            if number not in later:
                self._send(number, request.at)

    def send(self, number: int, at: float, ready: float) -> None:
        """Send the request of that number at `at`; the engine may schedule it from `ready` on."""
        self.records[number].arrival = at
        heapq.heappush(self._arrivals, (ready, number))

    def advance(self, until: float) -> None:
        """Run steps until the clock is at `until`, which the last step may pass, or nothing is left to do."""
        unfinished = self.stepper.sequences
        while self.now < until and (self._arrivals or unfinished):
            if not unfinished:
                if self._arrivals[0][0] >= until:
                    return
                self.now = max(self.now, self._arrivals[0][0])
            self._arrive()
            self._step()

    def to_the_end(self) -> None:
        self.advance(math.inf)
        self.stepper.scheduler.check_integrity()

    def _send(self, number: int, at: float) -> None:
        self.send(number, at, at + self._prepare(self.trace[number]))

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now:
            _, number = heapq.heappop(self._arrivals)
            request, record = self.trace[number], self.records[number]
            before = self._ended.pop(number, None)
            seq = to_sequence(request, number, before, record.arrival)
            if seq.spans:
                record.kind = "cached image"
            fits = len(seq.prompt_ids) + request.output <= self.context
            if not fits or not self._accept(request, number, before):
                record.ended, record.reason = self.now, "refused"
                self._follow(number, seq)

    def _follow(self, number: int, seq: TokenSequence) -> None:
        """Let the client whose request has ended send its next one."""
        follower = self._following.get(number)
        if follower is not None:
            if follower.continues:
                self._ended[follower.number] = seq
            self._send(follower.number, self.now + self.trace[follower.number].at)

    def _accept(self, request: TraceRequest, number: int, before: TokenSequence | None) -> bool:
        """Add a request to the scheduler, unless the queue is full or its first token would be late."""
        if len(self.stepper.sequences) >= self.max_in_flight:
            return False
        for steps_down in self.gate.attempts:
            seq = to_sequence(request, number, before, self.records[number].arrival, steps_down)
            expected = self.gate.expect(seq)
            if not request.images or not self.gate.late(seq, expected):
                break
        try:
            self.gate.enter(seq, expected, steps_down)
        except Overloaded:
            return False
        self.stepper.add(seq, SequenceInputs())
        return True

    def _step(self) -> None:
        step = self.stepper.plan(self.now)
        for seq in step.expired:
            self._record_end(seq, "timeout")
        if not step.plan:
            self._stall()
            return
        self._stalls = 0
        self._mark(step)
        result = self.stepper.executor.execute(step.plan, step.encode_s)
        seconds = result.seconds or 0.0
        self.now += seconds
        self.busy += seconds
        self.stepper.apply(step, result, seconds)
        for seq in [self.stepper.sequences[seq_id] for seq_id in result.sampled]:
            self.records[int(seq.id)].tokens += [self.now] * len(result.sampled[seq.id])
            if len(seq.output_ids) >= seq.max_tokens:
                self.stepper.finish(seq, "length")
                self._record_end(seq, "length")
        self.now += self.cost.between_s

    def _stall(self) -> None:
        if self.stepper.idle:
            return
        self.now += STALL_S
        self._stalls += 1
        if self._stalls > MOST_STALLS:
            raise EngineError(
                f"at {self.now:.3f} s no sequence advances, yet {len(self.stepper.sequences)} requests wait"
            )

    def _mark(self, step: Step) -> None:
        for item in step.plan.work:
            record = self.records[int(item.seq.id)]
            if record.admitted is None:
                record.admitted = self.now
        for job in step.plan.encode:
            for holder in job.holders:
                self.records[int(holder)].kind = "new image"

    def _record_end(self, seq: TokenSequence, reason: str) -> None:
        record = self.records[int(seq.id)]
        record.ended, record.reason, record.times_passed = self.now, reason, seq.times_passed
        self._follow(int(seq.id), seq)


def report_of(
    runs: Sequence[Run], records: list[Record], trace: Trace, bounds: Bounds, warm_up: int = 0
) -> Report:
    """Return the figures of the engines that have served a trace together. Counters are sums over them.

    records: of all requests, in the order of the trace.
    """
    records = records[warm_up:]
    end = max(run.now for run in runs)
    began = trace[warm_up - 1].at if warm_up else 0.0
    seconds = end - began or math.nan
    whole = [record for record in records if record.reason == "length"]
    steppers = [run.stepper for run in runs]
    kvs = [stepper.scheduler.kv for stepper in steppers]
    caches = [stepper.scheduler.embeddings for stepper in steppers]
    encoded = sum(stepper.encoded_images for stepper in steppers)
    requested_images = sum(len(request.images) for request in trace)
    hits, looked_up = sum(one.hits for one in caches), sum(one.hits + one.misses for one in caches)
    queried = sum(kv.query_tokens for kv in kvs)
    by_kind = {kind: [record for record in records if record.kind == kind] for kind in KINDS}
    classes = {"all": records, **{kind: some for kind, some in by_kind.items() if some}}
    return Report(
        seconds=end,
        steps=sum(stepper.steps for stepper in steppers),
        busy=sum(run.busy for run in runs) / (end * len(runs) or math.nan),
        tokens_per_s=sum(len(record.tokens) for record in records) / seconds,
        requests_per_s=len(whole) / seconds,
        goodput=sum(record.good(bounds.ttft_s, bounds.itl_s) for record in records) / seconds,
        prefix_hits=sum(kv.hit_tokens for kv in kvs) / queried if queried else math.nan,
        encoder_hits=hits / looked_up if looked_up else math.nan,
        images_spared=1 - encoded / requested_images if requested_images else math.nan,
        images_encoded=encoded,
        encode_seconds=sum(stepper.encode_seconds for stepper in steppers),
        preemptions=sum(stepper.scheduler.preemptions for stepper in steppers),
        refused=sum(record.reason == "refused" for record in records),
        timeouts=sum(record.reason == "timeout" for record in records),
        most_passed=max((record.times_passed for record in records), default=0),
        classes={name: ClassReport.of(some, bounds.ttft_s, bounds.itl_s) for name, some in classes.items()},
    )
