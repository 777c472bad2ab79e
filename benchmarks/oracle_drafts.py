"""A drafter that knows the answers, so that drafts of a chosen acceptance can be timed.

It serves to measure what speculation is worth on a machine: random weights give texts that no real drafter
can expect.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from random import Random

from fovea.engine.job import SequenceInputs
from fovea.engine.sequence import Sequence
from fovea.engine.speculate.texts import NOTHING, Continuation


class Oracle:
    """Drafts of known answers, of which each is right with a chosen probability.

    answers: token ids of the answers, by the ids of their prompts.
    chance: probability of each draft. drafts: number of drafts; 0: none.
    claim: probability that it states instead; None: it is honest.
    """

    name = "prompt"

    def __init__(self, chance: float = 1.0, drafts: int = 0) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.chance, self.drafts = chance, drafts
        self.claim: float | None = None
        self._random = Random(1)

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        """Nothing is kept of a sequence."""

    def draft(self, seq: Sequence, answer: Seq[int], most: int) -> Continuation:
        known = self.answers.get(tuple(seq.prompt_ids))
        if not known or not self.drafts:
            return NOTHING
        tokens = known[len(answer) : len(answer) + self.drafts]
        wrong = [token if self._random.random() < self.chance else (token + 1) % 100 for token in tokens]
        stated = self.chance if self.claim is None else self.claim
        return Continuation(wrong, [stated] * len(wrong), 2)

    def remove(self, seq: Sequence) -> None:
        """Learn the answer of a sequence that has ended, unless a longer one is known."""
        ids = tuple(seq.prompt_ids)
        if len(seq.output_ids) > len(self.answers.get(ids, ())):
            self.answers[ids] = list(seq.output_ids)

    def clear(self) -> None:
        self.answers.clear()


def chance_for(tokens: float, drafts: int) -> float:
    """Return the probability of a draft with which a step yields so many tokens on average."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**place for place in range(drafts + 1)) < tokens:
            low = middle
        else:
            high = middle
    return low
