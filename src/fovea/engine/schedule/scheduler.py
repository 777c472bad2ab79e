"""Iteration-level scheduling by tokens computed against tokens wanted.

Each step, every running sequence may compute some of its missing tokens within three budgets: tokens, visual tokens to
encode, and sequences. Decodes want one token and come first, so a long prompt fills only what they leave and never
stalls them; a prompt that does not fit is continued in the next step. Then waiting sequences join, first come first
served, as long as the whole of their prompt finds blocks beside what runs.

An image is encoded when the first token of its span is about to be computed, and not before: a prefix hit that covers
the span needs no encoder at all. If the encoder's budget is spent, the chunk ends where the image begins.

A waiting sequence whose next block is being computed by a running one lets others pass and joins when that block is
there: ten questions about one new image prefill it once.

When the pool is empty, the sequence that arrived last gives its blocks back and waits in front. It loses time, not
text: its tokens are recomputed, and what is still in the pool is found again.
"""

from __future__ import annotations

from bisect import insort
from typing import Any

from fovea.core.types import FinishReason
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.cache.manager import KVManager
from fovea.engine.config import EngineConfig
from fovea.engine.schedule.plan import EncodeJob, StepPlan, Work
from fovea.engine.sequence import Sequence, Status


class _Budget:
    """What is left of one step."""

    def __init__(self, config: EngineConfig) -> None:
        self.tokens = config.max_step_tokens
        self.visual = config.max_step_visual_tokens
        self.work: dict[str, Work] = {}
        self.jobs: dict[str, EncodeJob] = {}
        self.preempted: list[str] = []

    def refund(self, seq: Sequence) -> None:
        """The sequence leaves the step after all. Images only it waited for are not encoded."""
        work = self.work.pop(seq.id, None)
        if work is not None:
            self.tokens += work.count
        for key in list(self.jobs):
            job = self.jobs[key]
            job.holders.discard(seq.id)
            if not job.holders:
                self.visual += job.span.tokens
                del self.jobs[key]


class Scheduler:
    def __init__(self, config: EngineConfig, kv: KVManager, embeddings: EmbeddingCache[Any]) -> None:
        self.config = config
        self.kv = kv
        self.embeddings = embeddings
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        self._wait(seq)

    def schedule(self) -> StepPlan:
        budget = _Budget(self.config)
        for seq in sorted(self.running, key=lambda s: (not s.decoding, s.arrival, s.id)):
            if seq.status is Status.RUNNING and budget.tokens > 0:
                self._continue(seq, budget)
        if not budget.preempted:
            self._admit_waiting(budget)
        work = sorted(budget.work.values(), key=lambda w: not w.seq.decoding)
        return StepPlan(tuple(work), tuple(budget.jobs.values()), tuple(budget.preempted))

    def update(self, plan: StepPlan, sampled: dict[str, int]) -> None:
        """Fold an executed plan back in: tokens are computed, and those that asked got one more."""
        for item in plan.work:
            seq = item.seq
            if seq.status is not Status.RUNNING:
                continue
            self.kv.commit(seq, item.count)
            for span in seq.spans:
                if item.start < span.end <= seq.computed:
                    self.embeddings.release(span.key, seq.id)
            if seq.id in sampled:
                seq.output_ids.append(sampled[seq.id])

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End it at any point of its life; everything it held comes back. Ending twice is no error."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
        else:
            self._free(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed."""
        return [s for s in (*self.waiting, *self.running) if s.deadline is not None and now >= s.deadline]

    def check_integrity(self) -> None:
        self.kv.check_integrity()
        self.embeddings.check_integrity({seq.id for seq in self.running})

    def _continue(self, seq: Sequence, budget: _Budget) -> None:
        count = self._within_encoder(seq, min(seq.wanted, budget.tokens), budget)
        if count == 0:
            return
        while not self.kv.can_extend(seq, seq.computed + count):
            victim = max(self.running, key=lambda s: (s.arrival, s.id))
            self._preempt(victim, budget)
            if victim is seq:
                return
        self._take(seq, count, budget)

    def _admit_waiting(self, budget: _Budget) -> None:
        for seq in list(self.waiting):
            if len(self.running) >= self.config.max_running or budget.tokens <= 0:
                return
            match = self.kv.match(seq)
            if match.pending is not None:
                continue
            if not self.kv.can_admit(match, seq.length):
                return
            self.waiting.remove(seq)
            self.kv.admit(seq, match)
            seq.status = Status.RUNNING
            self.running.append(seq)
            count = self._within_encoder(seq, min(seq.wanted, budget.tokens), budget)
            if count and self.kv.can_extend(seq, seq.computed + count):
                self._take(seq, count, budget)

    def _take(self, seq: Sequence, count: int, budget: _Budget) -> None:
        self.kv.extend(seq, seq.computed + count)
        budget.tokens -= count
        budget.work[seq.id] = Work(seq, seq.computed, count)

    def _within_encoder(self, seq: Sequence, count: int, budget: _Budget) -> int:
        """`count`, or fewer where an image must be encoded that the encoder's budget has no room for."""
        for span in seq.spans_between(seq.computed, seq.computed + count):
            if self.embeddings.hold(span.key, seq.id):
                continue
            if span.key not in budget.jobs:
                if budget.jobs and span.tokens > budget.visual:
                    return max(0, span.start - seq.computed)
                budget.jobs[span.key] = EncodeJob(span, seq)
                budget.visual -= span.tokens
            budget.jobs[span.key].holders.add(seq.id)
        return count

    def _preempt(self, seq: Sequence, budget: _Budget) -> None:
        budget.refund(seq)
        budget.preempted.append(seq.id)
        self._free(seq)
        seq.preemptions += 1
        self.preemptions += 1
        self._wait(seq)

    def _free(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.kv.release(seq)
        for span in seq.spans:
            self.embeddings.release(span.key, seq.id)

    def _wait(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=lambda s: (s.arrival, s.id))
