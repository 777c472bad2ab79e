"""Decides how many drafts a step computes: as many as let the expected tokens per second rise.

Each draft is a row, which takes time, and is accepted with a known chance. The most likely drafts of all
sequences come first. So a few rows are divided among many sequences by their confidence, and a full batch,
in which a row costs what it brings, computes none. Method: as the verification budget of DSpark (vLLM's
blog, 2026).

The cost of a row is measured. A linear prediction (`step_times`) is not enough: on CPUs up to eight rows
cost little more than one. So the ratio of measured to predicted seconds is learnt for each number of rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from fovea.engine.schedule.step_times import StepTimes
from fovea.engine.sequence import Sequence
from fovea.planner.cost import Composition

LEAST_GAIN = 1.02
"""A step computes drafts only if it then yields at least so many times the tokens per second."""
WEIGHT = 0.1
"""Weight of a new ratio in the average of its number of rows."""
ELSEWHERE = 0.02
"""Weight of a ratio for all other numbers of rows: one that was not tried lately is expected to be alike."""
MOST_LOOKING = 0.02
"""Largest part of a step that a careful budget lets looking for drafts take."""
TRIAL = 48
"""Steps after which speculation is judged as a whole."""
FIRST_PAUSE, LONGEST_PAUSE = 64, 2048
"""Steps for which it pauses if it loses. The next pause is twice as long, until it wins."""
SIZES = (*range(1, 17), *range(20, 65, 4), *range(80, 257, 16))
"""Numbers of rows that are told apart. Others count as the next larger one."""
MOST_EXCESS = 2.0
"""Highest ratio that one step can have, so that a stall of the machine counts little."""


class Use(NamedTuple):
    """The use of drafts in a step.

    tokens: new tokens of its answers. plain_tokens, plain_rows: tokens and rows that there would have been
        without drafters, those that grammars force included.
    """

    tokens: int
    plain_tokens: int
    plain_rows: int


class DraftBudget:
    """The drafts that are worth their rows, from measured times of steps.

    times: predicts durations of steps.
    drafters: whether there are any, so that speculation has to be judged.
    careful: drafts are looked for only as long as this takes a small part of a step.
    left_out: drafts that were found, but would have cost more than they would have brought.
    context: mean number of tokens to which the rows of the latest step attended.
    worthwhile: whether drafts that are certain would pay in a step now, and speculation does not pause.
    drafting_s: seconds of the present step in which drafts were computed. They are no part of the cost of
        rows: a token would seem dear because of the drafts, and dear tokens justify drafts.
    """

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self.left_out = 0
        self.drafters = self.careful = False
        self._looking_s = 0.0
        self.worthwhile = True
        self.context = 0.0
        self.drafting_s = 0.0
        self._ratios = [1.0] * len(SIZES)
        self._pause, self._next_pause = 0, FIRST_PAUSE
        self._begin_trial()

    def choose(self, sequences: Iterable[Sequence]) -> None:
        """Shorten the drafts of sequences to those that are worth their rows.

        Drafts that a grammar forces stay: computed later, each would cost more than its row now.

        sequences: all that run. Those that do not decode yet have no rows here: a draft is not worth more
            because the step is long anyway, for a prompt that waits would get its first token later.
        """
        if not self.drafters:
            return
        decodes = [seq for seq in sequences if seq.decoding]
        if not decodes:
            self.worthwhile = not self._pause and self._pays(1)  # of the answer that begins next
            return
        self._pause = max(0, self._pause - 1)
        self.context = self._context(decodes)
        self.worthwhile = not self._pause and self._pays(len(decodes))
        offers = sorted(
            ((chance, number) for number, seq in enumerate(decodes) for chance in seq.chances[seq.forced :]),
            reverse=True,
        )
        if not offers:
            return
        taken = self._taken(decodes, [chance for chance, _ in offers])
        counts = [seq.forced for seq in decodes]
        for _, number in offers[:taken]:
            counts[number] += 1
        for seq, count in zip(decodes, counts, strict=True):
            if count < len(seq.drafts):
                self.left_out += len(seq.drafts) - count
                seq.keep_drafts(count)

    def _taken(self, decodes: Seq[Sequence], chances: Seq[float]) -> int:
        """Return how many drafts the step computes. chances: of all of them, the highest first."""
        rows, context = sum(1 + seq.forced for seq in decodes), self.context
        expected = float(rows)
        best, best_rate = 0, LEAST_GAIN * expected / self.seconds(rows, context)
        for count, chance in enumerate(chances, 1):
            expected += chance
            rate = expected / self.seconds(rows + count, context)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def note_looking(self, seconds: float) -> None:
        """Learn how long it took to look for drafts in texts in one step."""
        self._looking_s += (WEIGHT if self._looking_s else 1.0) * (seconds - self._looking_s)

    def _pays(self, rows: int) -> bool:
        """Whether a draft for each sequence would be worth its row if all of them were certain.

        If `careful`, looking for drafts must also be cheap beside a step, so that it cannot lose much.
        """
        if self.careful and self._looking_s > MOST_LOOKING * self.seconds(rows, self.context):
            return False
        return 2 * self.seconds(rows, self.context) > LEAST_GAIN * self.seconds(2 * rows, self.context)

    def pays_to_compute(
        self, answers: int, known: tuple[float, float], further: tuple[float, float], seconds: float
    ) -> bool:
        """Whether a step of these answers yields more tokens per second if further drafts are computed.

        known: number of drafts that there are, and how many of them are expected to be right.
        further: the same of those that would be added. seconds: time to compute them.
        """
        drafts, right = known
        plain = (answers + right) / self.seconds(round(answers + drafts), self.context)
        rows = round(answers + drafts + further[0])
        return (answers + right + further[1]) > LEAST_GAIN * plain * (
            self.seconds(rows, self.context) + seconds
        )

    def _judge(self, use: Use, seconds: float) -> None:
        """Compare steps with speculation with what they would have been without it, and pause it if it loses.

        Looking for drafts takes time, too, which no single decision can see. On a small model it may take
        longer than the drafts save. seconds: of the step, with the time for drafts of the next one.
        """
        if self._pause:
            return
        self._steps += 1
        self._tokens += use.tokens
        self._seconds += seconds
        self._plain_tokens += use.plain_tokens
        self._plain_seconds += self.seconds(use.plain_rows, self.context)
        if self._steps < TRIAL:
            return
        loses = self._tokens * self._plain_seconds < self._plain_tokens * self._seconds
        self._pause = self._next_pause if loses else 0
        self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE) if loses else FIRST_PAUSE
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._steps = self._tokens = self._plain_tokens = 0
        self._seconds = self._plain_seconds = 0.0

    def _context(self, decodes: Seq[Sequence]) -> float:
        return sum(seq.length - seq.dropped for seq in decodes) / len(decodes)

    def seconds(self, rows: int, context: float) -> float:
        """Return the expected seconds of a step that decodes so many rows.

        context: mean number of tokens to which a row attends.
        """
        ratio = self._ratios[min(bisect_left(SIZES, rows), len(SIZES) - 1)]
        return self.times.seconds(Composition(rows, int(rows * context))) * ratio

    def observe(self, composition: Composition, seconds: float, use: Use | None = None) -> None:
        """Learn from a step. Only steps that do nothing but decode tell the cost of rows.

        use: of its drafts; None: there are no drafters.
        """
        whole, seconds, self.drafting_s = seconds, max(0.0, seconds - self.drafting_s), 0.0
        if composition.prompt_tokens or not composition.decodes or not self.times.measured:
            return
        if use is not None and use.plain_tokens:
            self._judge(use, whole)
        predicted = self.times.seconds(composition)
        if predicted <= 0:
            return
        place = min(bisect_left(SIZES, composition.decodes), len(SIZES) - 1)
        ratio = min(seconds / predicted, MOST_EXCESS)
        self._ratios = [known + ELSEWHERE * (ratio - known) for known in self._ratios]
        self._ratios[place] += WEIGHT * (ratio - self._ratios[place])
