"""Chooses the drafts of each answer: those of the drafter that is expected to be right for longest.

    add(seq, inputs)          a sequence begins
    propose(seq, new)         after a step gave it new tokens: the next drafts, with their chances
    remove(seq)               it has ended

Expectations come from measured acceptance (`acceptance`). Whether a draft is worth its row is decided later,
when the other sequences of the step are known (`schedule.draft_budget`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from fovea.engine.job import SequenceInputs
from fovea.engine.sequence import NO_DRAFTS, Drafts, Sequence
from fovea.engine.speculate.acceptance import Acceptance, RequestAcceptance, compare
from fovea.engine.speculate.drafter import Drafter
from fovea.engine.speculate.texts import Continuation

LOOK_AFTER = 16
"""While drafts are not worth their rows, they are only looked for after so many steps of a sequence, to know
how good they would be: under load, the time for it would be missed."""
LEAST_CHANCE = 0.1
"""A draft that is right less often is not proposed."""


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


class Speculator:
    """The drafters of an engine that find drafts in texts. For one thread.

    drafters: in the order of preference among equals.
    most: most drafts of a sequence.
    worthwhile: whether a step has room for a draft at present.
    """

    def __init__(
        self, drafters: Seq[Drafter], most: int, worthwhile: Callable[[], bool] = lambda: True
    ) -> None:
        self.drafters = tuple(drafters)
        self.most = most
        self.acceptance = Acceptance()
        self._worthwhile = worthwhile
        self._records: dict[str, _Record] = {}

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        """Begin with a sequence."""
        if not seq.speculate:
            return
        self._records[seq.id] = _Record()
        for drafter in self.drafters:
            drafter.add(seq, inputs)

    def remove(self, seq: Sequence) -> None:
        if self._records.pop(seq.id, None) is not None:
            for drafter in self.drafters:
                drafter.remove(seq)

    def clear(self) -> None:
        """Forget the texts of all earlier answers."""
        for drafter in self.drafters:
            drafter.clear()

    def propose(self, seq: Sequence, new: Seq[int]) -> Drafts:
        """Return drafts of what follows an answer.

        new: tokens that the answer has just got, which `seq` does not know yet.
        """
        record = self._records.get(seq.id)
        if record is None:
            return NO_DRAFTS
        if record.length == len(seq.output_ids):  # not if a token came that was late
            self._compare(record, new)
        record.passed += 1
        worthwhile = self._worthwhile()
        if not worthwhile and record.passed < LOOK_AFTER:
            record.found = {}
            return NO_DRAFTS
        record.passed = 0
        answer = [*seq.output_ids, *new]
        record.length = len(answer)
        record.found = {drafter.name: drafter.draft(seq, answer, self.most) for drafter in self.drafters}
        return self._best(record) if worthwhile else NO_DRAFTS

    def _compare(self, record: _Record, new: Seq[int]) -> None:
        for name, found in record.found.items():
            for share, right in zip(found.shares, compare(found, new), strict=False):
                record.own.note(self.acceptance.chance(name, share, found.matched), right=right)
                self.acceptance.note(name, share, found.matched, right=right)

    def _best(self, record: _Record) -> Drafts:
        best, most = NO_DRAFTS, 0.0
        for name, found in record.found.items():
            chance, chances = 1.0, []
            for share in found.shares:
                chance *= min(1.0, record.own.factor * self.acceptance.chance(name, share, found.matched))
                if chance < LEAST_CHANCE:
                    break
                chances.append(chance)
            if sum(chances) > most:
                best, most = Drafts(found.tokens[: len(chances)], chances, 0, name), sum(chances)
        return best
