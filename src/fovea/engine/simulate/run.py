"""A trace through the real scheduler on a virtual clock: thousands of requests in seconds.

The clock jumps: to the end of a step, or, when nothing is there to do, to the next arrival. What arrives during a step
is heard after it, as in the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fovea.core.errors import EngineError
from fovea.core.trace import Trace
from fovea.engine.config import EngineConfig
from fovea.engine.schedule.batch import BatchControl
from fovea.engine.schedule.policy import Policy
from fovea.engine.sequence import Sequence
from fovea.engine.simulate.cost import CostModel
from fovea.engine.simulate.machine import Machine, Step
from fovea.engine.simulate.report import KINDS, ClassReport, Record, Report
from fovea.engine.simulate.trace import to_sequence

STALL_S = 0.002
"""What the engine's loop sleeps when a step is empty though requests wait."""
MOST_STALLS = 100_000
"""So many empty steps in a row are a defect of the scheduler, not a wait."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What counts as served well: first token within ttft_s, then itl_s per token; seconds."""

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
    """Serve `trace`, which is in order of arrival, to its end. policy, control: None is the configuration's.

    Requests that can never fit are refused, and those for which the queue is too long, as the engine does both.
    Raises EngineError when the scheduler comes to a standstill.
    """
    run = _Run(
        trace, config, Machine(config, cost, lambda seq: len(seq.output_ids), policy=policy, control=control)
    )
    run.to_the_end()
    return run.report(bounds or Bounds())


class _Run:
    def __init__(self, trace: Trace, config: EngineConfig, machine: Machine) -> None:
        self.machine = machine
        self.trace = trace
        self.records = [Record(request.at) for request in trace]
        self.room = config.max_running + config.max_queue if config.max_queue else math.inf
        self.context = min(config.max_context or machine.cost.max_context, machine.capacity)
        self.now = 0.0
        self.busy = 0.0
        self._next = 0
        self._stalls = 0

    def to_the_end(self) -> None:
        machine = self.machine
        while self._next < len(self.trace) or machine.unfinished:
            if not machine.unfinished:
                self.now = max(self.now, self.trace[self._next].at)
            self._arrive()
            for seq in machine.scheduler.expired(self.now):
                self._end(seq, "timeout")
            if machine.unfinished:
                self._step()
        machine.scheduler.check_integrity()

    def _arrive(self) -> None:
        while self._next < len(self.trace) and self.trace[self._next].at <= self.now:
            number, request = self._next, self.trace[self._next]
            self._next += 1
            record = self.records[number]
            if request.images:
                record.kind = "cached image"
            fits = request.prompt_tokens + request.output <= self.context
            if fits and len(self.machine.unfinished) < self.room:
                self.machine.add(to_sequence(request, number))
            else:
                record.ended, record.reason = self.now, "refused"

    def _step(self) -> None:
        step = self.machine.begin()
        if not step.plan:
            self.now += STALL_S
            self._stalls += 1
            if self._stalls > MOST_STALLS:
                raise EngineError(
                    f"at {self.now:.3f} s nothing advances, yet {len(self.machine.unfinished)} requests wait"
                )
            return
        self._stalls = 0
        self._mark(step)
        self.now += step.seconds
        self.busy += step.seconds
        for seq in self.machine.end(step):
            self.records[int(seq.id)].tokens.append(self.now)
            if len(seq.output_ids) >= seq.max_tokens:
                self._end(seq, "length")
        self.now += self.machine.cost.between_s

    def _mark(self, step: Step) -> None:
        for item in step.plan.work:
            record = self.records[int(item.seq.id)]
            if record.admitted is None:
                record.admitted = self.now
        for job in step.plan.encode:
            for holder in job.holders:
                self.records[int(holder)].kind = "new image"

    def _end(self, seq: Sequence, reason: str) -> None:
        self.machine.finish(seq, "length" if reason == "length" else "error")
        record = self.records[int(seq.id)]
        record.ended, record.reason, record.passed = self.now, reason, seq.times_passed

    def report(self, bounds: Bounds) -> Report:
        machine, records, seconds = self.machine, self.records, self.now or math.nan
        whole = [record for record in records if record.reason == "length"]
        kv, embeddings = machine.scheduler.kv, machine.embeddings
        asked = sum(len(request.images) for request in self.trace)
        looked_up = embeddings.hits + embeddings.misses
        by_kind = {kind: [record for record in records if record.kind == kind] for kind in KINDS}
        classes = {"all": records, **{kind: some for kind, some in by_kind.items() if some}}
        return Report(
            seconds=self.now,
            steps=machine.steps,
            busy=self.busy / seconds,
            tokens_per_s=sum(len(record.tokens) for record in records) / seconds,
            requests_per_s=len(whole) / seconds,
            goodput=sum(record.good(bounds.ttft_s, bounds.itl_s) for record in records) / seconds,
            prefix_hits=kv.hit_tokens / kv.query_tokens if kv.query_tokens else math.nan,
            encoder_hits=embeddings.hits / looked_up if looked_up else math.nan,
            images_spared=1 - machine.encoder.images / asked if asked else math.nan,
            images_encoded=machine.encoder.images,
            encode_seconds=machine.encoder.seconds,
            preemptions=machine.scheduler.preemptions,
            refused=sum(record.reason == "refused" for record in records),
            timeouts=sum(record.reason == "timeout" for record in records),
            most_passed=max((record.passed for record in records), default=0),
            classes={
                name: ClassReport.of(some, bounds.ttft_s, bounds.itl_s) for name, some in classes.items()
            },
        )
