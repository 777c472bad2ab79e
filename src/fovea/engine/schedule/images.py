"""Which images a step asks the encoder for, and whose outputs are held for whom.

Outputs that a sequence is about to read are held, so they are never evicted under it. Together with what a step asks
for they stay below the cache's ceiling, but for the images of one sequence, so that somebody always advances.
"""

from __future__ import annotations

from typing import Any

from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.schedule.budget import Budget
from fovea.engine.schedule.plan import EncodeJob
from fovea.engine.sequence import ImageSpan, Sequence


class ImageRequests:
    def __init__(self, embeddings: EmbeddingCache[Any], token_bytes: int) -> None:
        """token_bytes: what the encoder's output takes in memory, per visual token."""
        self.embeddings = embeddings
        self.token_bytes = token_bytes
        self._first: Sequence | None = None

    def begin(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """A step begins: the one sequence whose images may exceed the ceiling is the oldest that runs and has an image
        before it, else the one that has waited longest."""
        reading = [s for s in running if s.spans and s.spans[-1].end > s.computed]
        self._first = min(reading or waiting[:1], key=lambda s: (s.arrival, s.id), default=None)

    def up_to_missing(self, seq: Sequence, count: int, budget: Budget) -> int:
        """`count` tokens, or fewer where an image begins that is not encoded yet. The first of those is asked for, even
        where these tokens do not reach it."""
        stop = seq.computed + count
        for span in seq.spans:
            if span.end <= seq.computed:
                continue
            if span.start >= stop:
                if span.key not in self.embeddings:
                    self.ask(span, seq, budget, ahead=True)
                    return count
            elif not self.hold(span, seq, budget):
                self.ask(span, seq, budget)
                return max(0, span.start - seq.computed)
        return count

    def ask_next(self, seq: Sequence, computed: int, budget: Budget) -> bool:
        """Ask for the image that a sequence with so many tokens computed needs next. False: it is here, or none is left."""
        span = next((span for span in seq.spans if span.end > computed), None)
        if span is None or self.hold(span, seq, budget):
            return False
        self.ask(span, seq, budget)
        return True

    def ask_any(self, seq: Sequence, budget: Budget) -> bool:
        """Ask for the first that is missing, in whatever order they are read. False: all are here."""
        span = next((span for span in seq.spans if not self.hold(span, seq, budget)), None)
        if span is None:
            return False
        self.ask(span, seq, budget)
        return True

    def ready(self, seq: Sequence) -> bool:
        """Whether no image has to be encoded before it joins, as far as can be told without its prefix."""
        return not seq.spans or seq.spans[0].key in self.embeddings

    def hold(self, span: ImageSpan, seq: Sequence, budget: Budget) -> bool:
        """Whether its output is here, and there is room to keep it for the sequence beside what else is spoken for."""
        within = None if seq is self._first else self.embeddings.capacity - budget.bytes
        return self.embeddings.hold(span.key, seq.id, within)

    def ask(self, span: ImageSpan, seq: Sequence, budget: Budget, *, ahead: bool = False) -> None:
        """Ask for an image, once for all who do, if its output finds room beside what is held.

        ahead: not even the first may exceed the ceiling for it.
        """
        job = budget.jobs.get(span.key)
        if job is None:
            if budget.jobs and span.tokens > budget.visual:
                return
            size = span.tokens * self.token_bytes
            exceeds = self.embeddings.held_bytes + budget.bytes + size > self.embeddings.capacity
            if exceeds and (ahead or seq is not self._first):
                return
            budget.bytes += size
            job = budget.jobs[span.key] = EncodeJob(span)
            budget.visual -= span.tokens
        if seq.id not in job.holders:
            job.holders.append(seq.id)

    def release(self, seq: Sequence) -> None:
        for span in seq.spans:
            self.embeddings.release(span.key, seq.id)

    def release_computed(self, seq: Sequence) -> None:
        """Outputs of which every token is computed; one image may stand in a prompt twice."""
        needed = {span.key for span in seq.spans if span.end > seq.computed}
        for span in seq.spans:
            if span.key not in needed:
                self.embeddings.release(span.key, seq.id)
