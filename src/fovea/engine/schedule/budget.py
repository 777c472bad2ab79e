"""The remaining budget of a step, and the work assigned to it so far, while the step is planned."""

from __future__ import annotations

from fovea.engine.schedule.plan import EncodeJob, Work
from fovea.engine.schedule.prompt_room import PromptRoom
from fovea.engine.sequence import Sequence


class Budget:
    """The state of one step while it is planned.

    tokens: tokens that can still be assigned.
    visual: visual tokens of images that can still be requested.
    prompts: what of the tokens may be tokens of prompts.
    work: tokens to compute, by sequence id.
    jobs: images to encode, by key.
    preempted: ids of the sequences that lost their blocks.
    encoded_ids: ids of the sequences that only wanted their images encoded, when all of them are.
    """

    def __init__(self, tokens: int, visual: int, prompts: PromptRoom | None = None) -> None:
        """prompts: None: prompts may use all tokens."""
        self.tokens = tokens
        self.prompts = prompts or PromptRoom(tokens)
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

    def most(self, seq: Sequence) -> int:
        """Return the most tokens that a sequence may compute in this step."""
        if seq.decoding:
            return self.tokens
        return min(self.tokens, self.prompts.most(seq.computed_tokens, seq.missing_tokens))

    def take(self, work: Work) -> None:
        """Assign work to the step."""
        self.tokens -= work.count
        if not work.seq.decoding:
            self.prompts.take(work.start, work.count)
        self.work[work.seq.id] = work

    def refund(self, seq: Sequence) -> None:
        """Remove a sequence from the step. Images that no other sequence waits for are not encoded.

        The room for prompts stays as it is: after a preemption no other sequence joins in the step.
        """
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
