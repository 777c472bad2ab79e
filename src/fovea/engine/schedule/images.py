"""The choice of images that a step encodes, and the holds of sequences on encoder outputs.

A sequence holds the outputs that it is about to read, so they are not evicted before it has read them. Held
outputs and the outputs of the images that a step requests stay below the ceiling of the cache. Only the
images of one sequence may exceed it, so that at least one sequence always advances.
"""

from __future__ import annotations

from typing import Any

from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.schedule.plan import Budget, EncodeJob
from fovea.engine.sequence import ImageSpan, Sequence


class ImageRequests:
    """Request images from the encoder, and hold their outputs for the sequences that need them."""

    def __init__(self, embeddings: EmbeddingCache[Any], token_bytes: int, *, lasting: bool = False) -> None:
        """embeddings: cache of encoder outputs.

        token_bytes: memory of the encoder's output per row, which is a visual token or an image state.
        lasting: every later token of a sequence reads the outputs of its images (cross-attention), so a
            sequence holds them as long as it runs.
        """
        self.embeddings = embeddings
        self.token_bytes = token_bytes
        self.lasting = lasting
        self._first: Sequence | None = None

    def begin(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Begin a step: choose the one sequence whose images may exceed the ceiling.

        It is the oldest running sequence with an image that it still reads, or, if there is none, the
        sequence that has waited longest.
        """
        reading = [s for s in running if s.spans and (self.lasting or s.spans[-1].end > s.computed_tokens)]
        self._first = min(reading or waiting[:1], key=lambda s: (s.arrival, s.id), default=None)

    def tokens_before_unencoded_image(self, seq: Sequence, count: int, budget: Budget) -> int:
        """How many of the next `count` tokens can be computed: those before the first unencoded image.

        That image is requested, even if the `count` tokens end before it. The images on the way are held for
        the sequence; one that does not fit under the ceiling counts as unencoded.
        """
        if not self.lasting and (not seq.spans or seq.spans[-1].end <= seq.computed_tokens):
            return count  # the usual case, and a video may have thousands of spans
        stop = seq.computed_tokens + count
        for span in seq.spans:
            if span.end <= seq.computed_tokens and not self.lasting:
                continue
            if span.start >= stop:
                if span.key not in self.embeddings:
                    self.request(span, seq, budget, ahead=True)
                    return count
            elif not self.hold(span, seq, budget):
                self.request(span, seq, budget)
                return max(0, span.start - seq.computed_tokens)
        return count

    def request_next(self, seq: Sequence, computed: int, budget: Budget) -> bool:
        """Request the next image that a sequence with `computed` computed tokens needs.

        False if the image is encoded already, or if the sequence needs no more images.
        """
        for span in seq.spans:
            is_next = span.end > computed
            if not is_next and not self.lasting:
                continue
            if not self.hold(span, seq, budget):
                self.request(span, seq, budget)
                return True
            if is_next:
                return False
        return False

    def request_any(self, seq: Sequence, budget: Budget) -> bool:
        """Request the first image of the sequence that is not encoded. False if all are encoded."""
        span = next((span for span in seq.spans if not self.hold(span, seq, budget)), None)
        if span is None:
            return False
        self.request(span, seq, budget)
        return True

    def ready(self, seq: Sequence) -> bool:
        """Whether the sequence can join without encoding: it has no images, or the first one is encoded.

        The prefix cache is not consulted, although a prefix hit may make encoding unnecessary.
        """
        return not seq.spans or seq.spans[0].key in self.embeddings

    def hold(self, span: ImageSpan, seq: Sequence, budget: Budget) -> bool:
        """Hold the output of a span for the sequence.

        False if it is not in the cache or does not fit under the ceiling.

        The ceiling counts other held outputs and those of the images that this step has requested.
        """
        within = None if seq is self._first else self.embeddings.capacity - self._requested_bytes(budget)
        return self.embeddings.hold(span.key, seq.id, within)

    def request(self, span: ImageSpan, seq: Sequence, budget: Budget, *, ahead: bool = False) -> None:
        """Add an image to the step if its output fits beside the outputs that are held.

        Several sequences that request one image share one job.
        ahead: the image is not needed in this step, so it must fit under the ceiling for every sequence.
        """
        job = budget.jobs.get(span.key)
        if job is None:
            if budget.jobs and span.rows > budget.visual:
                return
            size = span.rows * self.token_bytes
            held_bytes = self.embeddings.held_bytes + self._requested_bytes(budget)
            exceeds = held_bytes + size > self.embeddings.capacity
            if exceeds and (ahead or seq is not self._first):
                return
            job = budget.jobs[span.key] = EncodeJob(span)
            budget.visual -= span.rows
        if seq.id not in job.holders:
            job.holders.append(seq.id)

    def _requested_bytes(self, budget: Budget) -> int:
        return budget.requested_visual * self.token_bytes

    def release(self, seq: Sequence) -> None:
        for span in seq.spans:
            self.embeddings.release(span.key, seq.id)

    def release_computed(self, seq: Sequence) -> None:
        """Release outputs whose tokens are all computed.

        An image that occurs again later in the prompt stays held.
        """
        if self.lasting:
            return
        needed = {span.key for span in seq.spans if span.end > seq.computed_tokens}
        for span in seq.spans:
            if span.key not in needed:
                self.embeddings.release(span.key, seq.id)
