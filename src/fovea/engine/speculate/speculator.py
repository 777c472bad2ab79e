"""Chooses the drafts of each answer: those of the drafter that is expected to be right for longest.

    add(seq, inputs)      a sequence begins
    propose(asked)        after a step gave sequences new tokens: the next drafts, with their chances
    remove(seq)           a sequence has ended

Expectations come from measured acceptance (`acceptance`). Whether a draft is worth its row is decided later,
when the other sequences of the step are known (`schedule.draft_budget`).
"""

from __future__ import annotations

import logging
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

log = logging.getLogger("fovea.engine")
LOOK_AFTER = 16
"""While drafts are not worth their rows, they are only looked for after so many steps of a sequence, to know
how good they would be: under load, the time for it would be missed."""
LEAST_CHANCE = 0.1
"""A draft that is right less often is not proposed."""
FIRST_GAIN = 1.0
"""Number of right drafts that a computed drafter is expected to find before it was asked."""
WEIGHT = 0.05
"""Weight of new drafts in the averages of a computed drafter."""
REFUSALS, REST = 32, 512
"""A computed drafter that did not pay so many times in a row rests for so many steps, and is tried again."""
IDLE = 64
"""Steps without worthwhile drafts after which computed drafters rest: the decoder hands out no states."""
HOPE = 0.9
"""Factor of its expected seconds after a rest."""


class Worth:
    """The use of a computed drafter, as it was measured.

    gain: right drafts of an answer in a step, on average.
    drafts: drafts of an answer. seconds: duration of the drafts of a step; 0: not known yet.
    """

    def __init__(self) -> None:
        self.gain, self.drafts, self.seconds = FIRST_GAIN, FIRST_GAIN, 0.0
        self._learnt = self._refused = self._rest = 0

    @property
    def rests(self) -> bool:
        """Whether it is not asked for a while. Call it once in each step."""
        self._rest = max(0, self._rest - 1)
        return self._rest > 0

    def learn(self, seconds: float, drafts: float) -> None:
        """Learn from drafts of a step. The first ones tell no time: kernels and caches are cold."""
        self._refused = 0
        self._learnt += 1
        if self._learnt > 1:
            weight = max(WEIGHT, 1 / (self._learnt - 1))
            self.seconds += weight * (seconds - self.seconds)
        self.drafts += WEIGHT * (drafts - self.drafts)

    def note_gain(self, right: int) -> None:
        """Learn how many of its drafts became part of an answer in a step."""
        self.gain += WEIGHT * (right - self.gain)

    def refuse(self) -> None:
        """Note that asking it would not have paid."""
        self._refused += 1
        if self._refused >= REFUSALS:
            self._refused, self._rest = 0, REST
            self.seconds *= HOPE


@dataclass(slots=True)
class _Record:
    """A sequence.

    seq: the sequence.
    found: what each drafter found last, by name.
    length: number of the answer's tokens then.
    chosen: name of the drafter whose drafts were proposed then; "": of none.
    passed: steps since drafters were asked.
    """

    seq: Sequence
    own: RequestAcceptance = field(default_factory=RequestAcceptance)
    found: dict[str, Continuation] = field(default_factory=dict)
    length: int = 0
    chosen: str = ""
    passed: int = 0


class DraftRequest(NamedTuple):
    """A sequence for which drafts are wanted. new: tokens it has just got, which it does not know yet."""

    seq: Sequence
    new: list[int]


class DeviceDrafter(Protocol):
    """A drafter that computes its drafts on the device, for all sequences of a step together.

    name: as in the setting `speculate` and in metrics.
    resting: it is not asked for many steps, because that would not pay. Sequences need no drafts of it until
        they end.
    """

    name: str
    resting: bool

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        """Begin with a sequence."""
        ...

    def draft(self, asked: Seq[DraftRequest], most: int) -> dict[str, Continuation]:
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
    ends: token ids that end an answer. Nothing is proposed after one.
    """

    def __init__(
        self, drafters: Seq[Drafter], most: int, budget: DraftBudget, ends: frozenset[int] = frozenset()
    ) -> None:
        self.drafters = tuple(drafters)
        self.computed: list[DeviceDrafter] = []
        self.most = most
        self._ends = ends
        self._idle = 0
        self.acceptance = Acceptance()
        self._budget = budget
        budget.drafters = True
        self._records: dict[str, _Record] = {}
        self.worth: dict[str, Worth] = {}

    def use(self, computed: DeviceDrafter) -> None:
        """Use a drafter that computes drafts, after those that are used already."""
        self.computed.append(computed)
        self.worth[computed.name] = Worth()

    @property
    def worthwhile(self) -> bool:
        """Whether a step has room for drafts at present."""
        return self._budget.worthwhile

    def add(self, seq: Sequence, inputs: SequenceInputs) -> None:
        """Begin with a sequence."""
        if not seq.speculate:
            return
        self._records[seq.id] = _Record(seq)
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

    def propose(self, asked: Seq[DraftRequest]) -> dict[str, Drafts]:
        """Return drafts of what follows each of some answers, by the id of its sequence."""
        began = time.perf_counter()
        try:
            return self._propose(asked)
        finally:
            self._budget.drafting_s += time.perf_counter() - began

    def _propose(self, asked: Seq[DraftRequest]) -> dict[str, Drafts]:
        known = [each for each in asked if each.seq.id in self._records]
        began = time.perf_counter()
        looked = [each for each in known if self._look(each)]
        if looked:  # as if all had been looked at: under load, only some are
            self._budget.note_looking((time.perf_counter() - began) * len(known) / len(looked))
        if not self._budget.worthwhile:
            self._idle += 1
            if self._idle == IDLE:
                for drafter in self.computed:
                    drafter.resting = True
            return {}
        self._idle = 0
        best = {each.seq.id: self._best(each.seq.id) for each in looked}
        for drafter in tuple(self.computed):
            self._ask(drafter, looked, best)
        for name, drafts in best.items():
            self._records[name].chosen = drafts.drafter
        return best

    def _ask(self, drafter: DeviceDrafter, looked: Seq[DraftRequest], best: dict[str, Drafts]) -> None:
        """Ask a computed drafter for answers for which it is expected to do better, if that saves time."""
        worth = self.worth[drafter.name]
        drafter.resting = worth.rests
        if drafter.resting or not looked:
            return
        weak = [each for each in looked if sum(best[each.seq.id].chances) < worth.gain]
        known = sum(len(drafts.tokens) for drafts in best.values())
        expected = sum(sum(drafts.chances) for drafts in best.values())
        more = sum(worth.drafts - len(best[each.seq.id].tokens) for each in weak)
        gained = sum(worth.gain - sum(best[each.seq.id].chances) for each in weak)
        if not weak:
            return
        if not self._budget.pays_to_compute(
            len(looked), (known, expected), (max(0.0, more), gained), worth.seconds
        ):
            worth.refuse()
            return
        began = time.perf_counter()
        try:
            answers = drafter.draft(weak, self.most)
        except Exception:
            # Drafts only save time. Out of memory, or a broken layer: the others go on.
            log.exception("drafts failed: the drafter %r is not asked until the next start", drafter.name)
            self._drop(drafter)
            return
        seconds = time.perf_counter() - began
        if answers:
            worth.learn(seconds, sum(len(found.tokens) for found in answers.values()) / len(answers))
        for name, found in answers.items():
            self._records[name].found[drafter.name] = found
            best[name] = self._best(name)

    def _drop(self, drafter: DeviceDrafter) -> None:
        """Use a drafter no more, and let it free what it has of each sequence."""
        self.computed.remove(drafter)
        drafter.resting = True
        for seq in [record.seq for record in self._records.values()]:
            drafter.remove(seq)

    def _look(self, asked: DraftRequest) -> bool:
        """Compare what was found with the new tokens, and look in texts. Returns whether this was done."""
        seq, new = asked
        record = self._records[seq.id]
        if record.length == len(seq.output_ids):  # not if a token came that was late
            self._compare(record, new)
        record.found, record.chosen = {}, ""
        record.passed += 1
        if not self._budget.worthwhile and record.passed < LOOK_AFTER:
            return False
        record.passed = 0
        answer = [*seq.output_ids, *new]
        record.length = len(answer)
        record.found = {drafter.name: drafter.draft(seq, answer, self.most) for drafter in self.drafters}
        return True

    def _compare(self, record: _Record, new: Seq[int]) -> None:
        if record.chosen in self.worth:
            accepted = min(len(new) - 1, len(record.found[record.chosen].tokens))
            if compare(record.found[record.chosen], new[: accepted + 1])[:accepted] == [True] * accepted:
                self.worth[record.chosen].note_gain(accepted)
        for name, found in record.found.items():
            for share, right in zip(found.shares, compare(found, new), strict=False):
                record.own.note(self.acceptance.chance(name, share, found.matched), right=right)
                self.acceptance.note(name, share, found.matched, right=right)

    def _best(self, name: str) -> Drafts:
        record = self._records[name]
        best, most = NO_DRAFTS, 0.0
        for drafter, found in record.found.items():
            chances = self._chances(record, drafter, found)
            if not record.seq.sampling.ignore_eos:
                chances = chances[: self._length(found.tokens)]
            if sum(chances) > most:
                best, most = Drafts(found.tokens[: len(chances)], chances, 0, drafter), sum(chances)
        return best

    def _length(self, tokens: Seq[int]) -> int:
        """Return the number of tokens up to the first that ends the answer, this one included."""
        ends = (count for count, token in enumerate(tokens, 1) if token in self._ends)
        return next(ends, len(tokens))

    def _chances(self, record: _Record, drafter: str, found: Continuation) -> list[float]:
        """Return the probabilities that each draft and all before it are right, down to LEAST_CHANCE."""
        chance, chances = 1.0, []
        for share in found.shares:
            chance *= min(1.0, record.own.factor * self.acceptance.chance(drafter, share, found.matched))
            if chance < LEAST_CHANCE:
                break
            chances.append(chance)
        return chances
