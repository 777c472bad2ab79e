"""Iteration-level scheduling by tokens computed against tokens wanted.

Each step, every running sequence may compute some of its missing tokens within three budgets: tokens, sequences, and
what `pace` leaves beside the decodes. Decodes want one token and come first, so a long prompt fills only what they leave
and never stalls them; a prompt that does not fit is continued in the next step.

Images are encoded beside that, not before it. A sequence computes its tokens up to the first image that is not encoded
yet, and asks for that image; the encoder works on the images that are asked for a slice at a time. Sequences that wait
ask too, so their images are encoded ahead, and they join when they have what they need first: a new image holds neither
blocks nor anybody else. A prefix hit that covers an image needs no encoder at all.

Then waiting sequences join, in the order of a policy, as long as the whole of their prompt finds blocks beside what runs.
One whose next block is being computed by a running one lets others pass and joins when that block is there: ten
questions about one new image prefill it once. Nobody is passed more than `max_passes` times.

When the pool is empty, the sequence that arrived last gives its blocks back and waits in front. It loses time, not
text: its tokens are recomputed, and what is still in the pool is found again.
"""

from __future__ import annotations

from bisect import insort
from typing import Any

from fovea.core.types import FinishReason
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.config import EngineConfig
from fovea.engine.kv.manager import KVManager, PrefixMatch
from fovea.engine.schedule.budget import Budget
from fovea.engine.schedule.images import ImageRequests
from fovea.engine.schedule.plan import StepPlan, Work
from fovea.engine.schedule.policy import POLICIES, Policy
from fovea.engine.sequence import Sequence, Status

LOOKAHEAD = 32
"""Waiting sequences that are looked at for images to encode ahead when nobody can join."""


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        kv: KVManager,
        embeddings: EmbeddingCache[Any],
        *,
        visual_token_bytes: int = 1,
        policy: Policy | None = None,
    ) -> None:
        """visual_token_bytes: what the encoder's output takes in memory, per visual token."""
        self.config = config
        self.policy = policy or POLICIES[config.policy]()
        self.kv = kv
        self.embeddings = embeddings
        self.images = ImageRequests(embeddings, visual_token_bytes)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.steps = 0
        self._most = config.max_running

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        seq.came = self.steps
        self._wait(seq)

    @property
    def decodes(self) -> int:
        return sum(seq.decoding for seq in self.running)

    @property
    def readers(self) -> int:
        """Decoding sequences whose rhythm counts against what waits for a first token: all but those that have images and
        got their own first token when everybody who waits was here already. Of several pictures asked about at once, the
        first to be answered has no right to hold up the others. A target in milliseconds holds for everybody.
        """
        if self.config.target_itl_ms:
            return self.decodes
        newest = max((s.came for s in (*self.waiting, *self.running) if not s.decoding), default=self.steps)
        return sum(s.decoding and (not s.spans or s.began <= newest) for s in self.running)

    def schedule(self, prompt_tokens: int | None = None, running: int | None = None) -> StepPlan:
        """The next step; at most `prompt_tokens` beside the decodes, and nobody joins where `running` already run.

        None: no bound but the configured one.
        """
        self._most = min(self.config.max_running, running or self.config.max_running)
        tokens = self.config.max_step_tokens
        self.steps += 1
        self.images.begin(self.running, self.waiting)
        if prompt_tokens is not None:
            tokens = min(tokens, self.decodes + prompt_tokens)
        budget = Budget(tokens, self.config.max_step_visual_tokens)
        for seq in sorted(self.running, key=lambda s: (not s.decoding, s.arrival, s.id)):
            if seq.status is Status.RUNNING and budget.tokens > 0:
                self._continue(seq, budget)
        self._admit_waiting(budget)
        work = sorted(budget.work.values(), key=lambda w: not w.seq.decoding)
        return StepPlan(
            tuple(work),
            tuple(budget.jobs.values()),
            tuple(budget.preempted),
            tuple(budget.done),
            self.kv.take_moves(),
        )

    def update(self, plan: StepPlan, sampled: dict[str, int]) -> None:
        """Fold an executed plan back in: tokens are computed, and those that asked got one more."""
        self.kv.finish_moves()
        for item in plan.work:
            seq = item.seq
            if seq.status is not Status.RUNNING:
                continue
            self.kv.commit(seq, item.count)
            if any(item.start < span.end <= seq.computed for span in seq.spans):
                self.images.release_computed(seq)
            if seq.id in sampled:
                seq.began = seq.began or self.steps
                seq.output_ids.append(sampled[seq.id])

    def abandon(self) -> None:
        """The step failed; its sequences are ended by whoever ran it."""
        self.kv.abandon_moves()

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End it at any point of its life; everything it held comes back. Ending twice is no error."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
            self.images.release(seq)
        else:
            self._free(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed."""
        return [s for s in (*self.waiting, *self.running) if s.deadline is not None and now >= s.deadline]

    def check_integrity(self) -> None:
        self.kv.check_integrity()
        self.embeddings.check_integrity({seq.id for seq in (*self.running, *self.waiting)})

    def _continue(self, seq: Sequence, budget: Budget) -> None:
        count = self.images.up_to_missing(seq, min(seq.wanted, budget.tokens), budget)
        if count == 0:
            return
        while not self.kv.can_extend(seq, seq.computed + count):
            victim = max(self.running, key=lambda s: (s.arrival, s.id))
            self._preempt(victim, budget)
            if victim is seq:
                return
        self._take(seq, count, budget)

    def _admit_waiting(self, budget: Budget) -> None:
        room = not budget.preempted
        looked_at = 0
        oldest = self.waiting[0] if self.waiting else None
        if oldest is not None:
            self._ask_first(oldest, budget)
        for seq in self.policy.order(tuple(self.waiting), self.images.ready):
            room = room and len(self.running) < self._most and budget.tokens > 0
            looked_at += 1
            if not room and looked_at > LOOKAHEAD:
                return
            if seq.encode_only:
                if seq is not oldest:
                    self._encode_only(seq, budget)
                continue
            match = self.kv.match(seq)
            if match.pending is not None:
                continue
            if self.images.ask_next(seq, self.kv.matched_tokens(match), budget):
                room = room and not self.policy.strict
                continue
            if room and self._may_pass(seq):
                room = self.kv.can_admit(match, seq.length)
                if room:
                    self._admit(seq, match, budget)

    def _ask_first(self, seq: Sequence, budget: Budget) -> None:
        """The image of the one who has waited longest is asked for before a policy puts others in front."""
        if seq.encode_only:
            self._encode_only(seq, budget)
            return
        match = self.kv.match(seq)
        if match.pending is None:
            self.images.ask_next(seq, self.kv.matched_tokens(match), budget)

    def _encode_only(self, seq: Sequence, budget: Budget) -> None:
        if not self.images.ask_any(seq, budget):
            budget.done.append(seq.id)

    def _admit(self, seq: Sequence, match: PrefixMatch, budget: Budget) -> None:
        self.waiting.remove(seq)
        for other in self.waiting:
            if _passes(seq, other):
                other.passed += 1
        self.kv.admit(seq, match)
        self.images.release_computed(seq)
        seq.status = Status.RUNNING
        self.running.append(seq)
        count = self.images.up_to_missing(seq, min(seq.wanted, budget.tokens), budget)
        if count and self.kv.can_extend(seq, seq.computed + count):
            self._take(seq, count, budget)

    def _may_pass(self, seq: Sequence) -> bool:
        """Whether nobody who came earlier has been passed too often."""
        return not any(
            other.passed >= self.config.max_passes for other in self.waiting if _passes(seq, other)
        )

    def _take(self, seq: Sequence, count: int, budget: Budget) -> None:
        self.kv.extend(seq, seq.computed + count)
        budget.tokens -= count
        budget.work[seq.id] = Work(seq, seq.computed, count)

    def _preempt(self, seq: Sequence, budget: Budget) -> None:
        budget.refund(seq)
        budget.preempted.append(seq.id)
        self._free(seq)
        seq.preemptions += 1
        self.preemptions += 1
        self._wait(seq)

    def _free(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.kv.release(seq)
        self.images.release(seq)

    def _wait(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=lambda s: (s.arrival, s.id))


def _passes(seq: Sequence, other: Sequence) -> bool:
    """Whether `other` came earlier. Who only wants an image encoded takes no place, so nobody passes it."""
    return (other.arrival, other.id) < (seq.arrival, seq.id) and not other.encode_only
