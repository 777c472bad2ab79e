"""What is left of one step while it is planned."""

from __future__ import annotations

from fovea.engine.schedule.plan import EncodeJob, Work
from fovea.engine.sequence import Sequence


class Budget:
    """tokens: still to give. visual: tokens of images that may still be asked for. bytes: outputs that were."""

    def __init__(self, tokens: int, visual: int) -> None:
        self.tokens = tokens
        self.visual = visual
        self.bytes = 0
        self.work: dict[str, Work] = {}
        self.jobs: dict[str, EncodeJob] = {}
        self.preempted: list[str] = []
        self.done: list[str] = []

    def refund(self, seq: Sequence) -> None:
        """The sequence leaves the step after all. Images only it waited for are not encoded."""
        work = self.work.pop(seq.id, None)
        if work is not None:
            self.tokens += work.count
        for key in list(self.jobs):
            job = self.jobs[key]
            if seq.id in job.holders:
                job.holders.remove(seq.id)
            if not job.holders:
                self.visual += job.span.tokens
                del self.jobs[key]
