"""The remaining budget of a step, and the work assigned to it so far, while the step is planned."""

from __future__ import annotations

from fovea.engine.schedule.plan import EncodeJob, Work
from fovea.engine.sequence import Sequence


class Budget:
    """The state of one step while it is planned.

    tokens: tokens that can still be assigned.
    visual: visual tokens of images that can still be requested.
    work: tokens to compute, by sequence id.
    jobs: images to encode, by key.
    preempted: ids of the sequences that lost their blocks.
    encoded_ids: ids of the sequences that only wanted their images encoded, when all of them are.
    """

    def __init__(self, tokens: int, visual: int) -> None:
        self.tokens = tokens
        self.visual = visual
        self._all_visual = visual
        self.work: dict[str, Work] = {}
        self.jobs: dict[str, EncodeJob] = {}
        self.preempted: list[str] = []
        self.encoded_ids: list[str] = []

    @property
    def requested_visual(self) -> int:
        """Visual tokens of the images that have been requested so far."""
        return self._all_visual - self.visual

    def refund(self, seq: Sequence) -> None:
        """Remove a sequence from the step. Images that no other sequence waits for are not encoded."""
        work = self.work.pop(seq.id, None)
        if work is not None:
            self.tokens += work.count
        for key in list(self.jobs):
            job = self.jobs[key]
            if seq.id in job.holders:
                job.holders.remove(seq.id)
            if not job.holders:
                self.visual += job.span.rows
                del self.jobs[key]
