"""Runs a trace through the real scheduler on a virtual clock: thousands of requests in seconds.

The clock jumps to the end of the step or, if there is nothing to do, to the next arrival. Requests that
arrive during a step are added after it, as in the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fovea.core.errors import EngineError
from fovea.core.trace import Trace
from fovea.engine.config import EngineConfig
from fovea.engine.job import SequenceInputs
from fovea.engine.schedule.batch import BatchControl
from fovea.engine.schedule.policy import Policy
from fovea.engine.sequence import Sequence
from fovea.engine.simulate.assemble import context_limit, simulated_stepper
from fovea.engine.simulate.executor import CostExecutor
from fovea.engine.simulate.report import KINDS, ClassReport, Record, Report
from fovea.engine.simulate.trace import to_sequence
from fovea.engine.step.stepper import Step, Stepper
from fovea.planner.cost import CostModel

STALL_S = 0.002
"""Pause of the engine's loop after a step in which nothing could advance."""
MOST_STALLS = 100_000
"""This many empty steps in a row are a defect of the scheduler and no mere waiting."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a good answer.

    ttft_s: seconds to the first token.
    itl_s: mean seconds per further token.
    """

    ttft_s: float = 1.0
    itl_s: float = 0.05


def simulate(
    trace: Trace,
    config: EngineConfig,
    cost: CostModel,
    policy: Policy | None = None,
    *,
    control: BatchControl | None = None,
    bounds: Bounds | None = None,
) -> Report:
    """Serve a trace to its end.

    As in the engine, a request that can never fit is refused, and so is one that finds the queue full.

    trace: in order of arrival.
    policy, control: None: those of the configuration.
    bounds: bounds of a good answer; None: the defaults.
    Raises EngineError when no sequence can advance any more.
    """
    stepper = simulated_stepper(
        config,
        cost,
        lambda embeddings: CostExecutor(cost, embeddings, lambda seq: len(seq.output_ids)),
        policy=policy,
        control=control,
    )
    run = _Run(trace, config, cost, stepper)
    run.to_the_end()
    return run.report(bounds or Bounds())


class _Run:
    """One run of a trace.

    now: the virtual clock, in seconds.
    busy: seconds in which a step ran.
    """

    def __init__(self, trace: Trace, config: EngineConfig, cost: CostModel, stepper: Stepper) -> None:
        self.cost = cost
        self.stepper = stepper
        self.trace = trace
        self.records = [Record(request.at) for request in trace]
        self.room = config.schedule.room or math.inf
        self.context = context_limit(config, cost)
        self.now = 0.0
        self.busy = 0.0
        self._next = 0
        self._stalls = 0

    def to_the_end(self) -> None:
        unfinished = self.stepper.sequences
        while self._next < len(self.trace) or unfinished:
            if not unfinished:
                self.now = max(self.now, self.trace[self._next].at)
            self._arrive()
            self._step()
        self.stepper.scheduler.check_integrity()

    def _arrive(self) -> None:
        while self._next < len(self.trace) and self.trace[self._next].at <= self.now:
            number, request = self._next, self.trace[self._next]
            self._next += 1
            record = self.records[number]
            if request.images:
                record.kind = "cached image"
            fits = request.prompt_tokens + request.output <= self.context
            if fits and len(self.stepper.sequences) < self.room:
                self.stepper.add(to_sequence(request, number), SequenceInputs())
            else:
                record.ended, record.reason = self.now, "refused"

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

    def _record_end(self, seq: Sequence, reason: str) -> None:
        record = self.records[int(seq.id)]
        record.ended, record.reason, record.times_passed = self.now, reason, seq.times_passed

    def report(self, bounds: Bounds) -> Report:
        stepper, records, seconds = self.stepper, self.records, self.now or math.nan
        whole = [record for record in records if record.reason == "length"]
        kv, embeddings = stepper.scheduler.kv, stepper.scheduler.embeddings
        requested_images = sum(len(request.images) for request in self.trace)
        looked_up = embeddings.hits + embeddings.misses
        by_kind = {kind: [record for record in records if record.kind == kind] for kind in KINDS}
        classes = {"all": records, **{kind: some for kind, some in by_kind.items() if some}}
        return Report(
            seconds=self.now,
            steps=stepper.steps,
            busy=self.busy / seconds,
            tokens_per_s=sum(len(record.tokens) for record in records) / seconds,
            requests_per_s=len(whole) / seconds,
            goodput=sum(record.good(bounds.ttft_s, bounds.itl_s) for record in records) / seconds,
            prefix_hits=kv.hit_tokens / kv.query_tokens if kv.query_tokens else math.nan,
            encoder_hits=embeddings.hits / looked_up if looked_up else math.nan,
            images_spared=1 - stepper.encoded_images / requested_images if requested_images else math.nan,
            images_encoded=stepper.encoded_images,
            encode_seconds=stepper.encode_seconds,
            preemptions=stepper.scheduler.preemptions,
            refused=sum(record.reason == "refused" for record in records),
            timeouts=sum(record.reason == "timeout" for record in records),
            most_passed=max((record.times_passed for record in records), default=0),
            classes={
                name: ClassReport.of(some, bounds.ttft_s, bounds.itl_s) for name, some in classes.items()
            },
        )
