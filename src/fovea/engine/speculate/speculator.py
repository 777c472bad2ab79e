"""Chooses the drafts of each answer: those of the drafter that is expected to be right for longest.

    add(seq, inputs)      a sequence begins
    propose(asked)        after a step gave sequences new tokens: the next drafts, with their chances
    remove(seq)           a sequence has ended

Expectations come from measured acceptance (`acceptance`). Whether a draft is worth its row is decided later,
when the other sequences of the step are known (`schedule.draft_budget`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fovea.engine.job import SequenceInputs
from fovea.engine.schedule.draft_budget import DraftBudget
from fovea.engine.sequence import NO_DRAFTS, Drafts, Sequence
from fovea.engine.speculate.acceptance import Acceptance, RequestAcceptance, compare
from fovea.engine.speculate.drafter import Drafter
from fovea.engine.speculate.texts import Continuation

LOOK_AFTER = 16
"""While drafts are not worth their rows, they are only looked for after so many steps of a sequence, to know
how good they would be: under load, the time for it would be missed."""
LEAST_CHANCE = 0.1
"""A draft that is right less often is not proposed."""
FIRST_GAIN = 1.0
"""Number of right drafts that a computed drafter is expected to find before it was asked."""
WEIGHT = 0.05
"""Weight of new drafts in the averages of a computed drafter: of right drafts, and of seconds."""
FORGET = 0.01
"""Part by which the seconds of a computed drafter become less when it is not asked, so that it is tried."""


@dataclass(slots=True)
class _Record:
    """A sequence.

    found: what each drafter found last, by name.
    length: number of the answer's tokens then.
    passed: steps since drafters were asked.
    """

    own: RequestAcceptance = field(default_factory=RequestAcceptance)
    found: dict[str, Continuation] = field(default_factory=dict)
    length: int = 0
    passed: int = 0


class Asked(NamedTuple):
    """A sequence for which drafts are wanted. new: tokens it has just got, which it does not know yet."""

    seq: Sequence
    new: list[int]


class Computed(Protocol):
    """A drafter that computes its drafts on the device, for all sequences of a step together.

    name: as in the setting `speculate` and in metrics.
    """

    name: str

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        """Begin with a sequence."""
        ...

    def draft(self, asked: Seq[Asked], most: int) -> dict[str, Continuation]:
        """Return up to `most` drafts of each sequence, by its id. A sequence may get none."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence. An unknown one is ignored."""
        ...


class Speculator:
    """The drafters of an engine. For one thread.

    drafters: those that find drafts in texts, in the order of preference among equals.
    computed: those that compute drafts. They are asked for sequences for which they are expected to do
        better than texts, as long as that saves more time than it takes.
    most: most drafts of a sequence.
    budget: knows whether drafts are worthwhile at present.
    """

    def __init__(self, drafters: Seq[Drafter], most: int, budget: DraftBudget) -> None:
        self.drafters = tuple(drafters)
        self.computed: list[Computed] = []
        self.most = most
        self.acceptance = Acceptance()
        self._budget = budget
        self._records: dict[str, _Record] = {}
        self._gains: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def use(self, computed: Computed) -> None:
        """Use a drafter that computes drafts, after those that are used already."""
        self.computed.append(computed)
        self._gains[computed.name], self._seconds[computed.name] = FIRST_GAIN, 0.0

    @property
    def worthwhile(self) -> bool:
        """Whether a step has room for drafts at present."""
        return self._budget.worthwhile

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        """Begin with a sequence."""
        if not seq.speculate:
            return
        self._records[seq.id] = _Record()
        for drafter in self.drafters:
            drafter.add(seq, inputs)
        for computed in self.computed:
            computed.add(seq, inputs)

    def remove(self, seq: Sequence) -> None:
        if self._records.pop(seq.id, None) is not None:
            for drafter in self.drafters:
                drafter.remove(seq)
            for computed in self.computed:
                computed.remove(seq)

    def clear(self) -> None:
        """Forget the texts of all earlier answers."""
        for drafter in self.drafters:
            drafter.clear()

    def propose(self, asked: Seq[Asked]) -> dict[str, Drafts]:
        """Return drafts of what follows each of some answers, by the id of its sequence."""
        known = [each for each in asked if each.seq.id in self._records]
        looked = [each for each in known if self._look(each)]
        if not self._budget.worthwhile:
            return {}
        best = {each.seq.id: self._best(each.seq.id) for each in looked}
        for drafter in self.computed:
            gain = self._gains[drafter.name]
            weak = [each for each in looked if sum(best[each.seq.id].chances) < gain]
            missing = sum(gain - sum(best[each.seq.id].chances) for each in weak)
            if missing * self._budget.token_s < self._seconds[drafter.name]:
                self._seconds[drafter.name] *= 1 - FORGET
                continue
            began = time.perf_counter()
            answers = drafter.draft(weak, self.most)
            seconds = time.perf_counter() - began
            self._budget.drafting_s += seconds
            if answers:
                self._seconds[drafter.name] += WEIGHT * (seconds - self._seconds[drafter.name])
            for name, found in answers.items():
                record = self._records[name]
                record.found[drafter.name] = found
                best[name] = self._best(name)
                gained = sum(self._chances(record, drafter.name, found))
                self._gains[drafter.name] += WEIGHT * (gained - self._gains[drafter.name])
        return best

    def _look(self, asked: Asked) -> bool:
        """Compare what was found with the new tokens, and look in texts. Returns whether this was done."""
        seq, new = asked
        record = self._records[seq.id]
        if record.length == len(seq.output_ids):  # not if a token came that was late
            self._compare(record, new)
        record.found = {}
        record.passed += 1
        if not self._budget.worthwhile and record.passed < LOOK_AFTER:
            return False
        record.passed = 0
        answer = [*seq.output_ids, *new]
        record.length = len(answer)
        record.found = {drafter.name: drafter.draft(seq, answer, self.most) for drafter in self.drafters}
        return True

    def _compare(self, record: _Record, new: Seq[int]) -> None:
        for name, found in record.found.items():
            for share, right in zip(found.shares, compare(found, new), strict=False):
                record.own.note(self.acceptance.chance(name, share, found.matched), right=right)
                self.acceptance.note(name, share, found.matched, right=right)

    def _best(self, name: str) -> Drafts:
        record = self._records[name]
        best, most = NO_DRAFTS, 0.0
        for drafter, found in record.found.items():
            chances = self._chances(record, drafter, found)
            if sum(chances) > most:
                best, most = Drafts(found.tokens[: len(chances)], chances, 0, drafter), sum(chances)
        return best

    def _chances(self, record: _Record, drafter: str, found: Continuation) -> list[float]:
        """Return the probabilities that each draft and all before it are right, down to LEAST_CHANCE."""
        chance, chances = 1.0, []
        for share in found.shares:
            chance *= min(1.0, record.own.factor * self.acceptance.chance(drafter, share, found.matched))
            if chance < LEAST_CHANCE:
                break
            chances.append(chance)
        return chances
