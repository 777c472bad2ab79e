"""Judge a sweep of benchmarks/relevance.py by its targets, and print it as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fovea.cli.sweep import aligned_markdown, difference, points, sweep_text
from fovea.core.media import AUTO
from fovea.evaluation.sweep import ALL, DETAILS, FULL, RELEVANCE, Setting, Sweep

WORDS = {True: "met", False: "**missed**", None: "not measured"}
MEANING_OF_MET = (
    '"Met" means that the measured value reaches the target; its interval may extend beyond it. '
    'Where a target says "beyond the interval", the whole interval has to reach it. Where it says "with an '
    'interval that includes 0", it must not be behind beyond the interval.'
)
HALF, QUARTER, TENTH = (Setting(RELEVANCE, share) for share in (0.5, 0.25, 0.1))
AUTOMATIC = Setting(RELEVANCE, AUTO)
RIVALS = ("dpp", "dart", "resize", "uniform", "random")
LOST = 0.003
"""Largest loss of accuracy of relevance at a half of the tokens."""
LEAST_RIGHT = {QUARTER: 0.92, TENTH: 0.84}
"""Least accuracy over all questions."""
AUTOMATIC_TARGETS = ((ALL, 0.4, 0.002), (DETAILS, 0.6, 0.0))
"""Groups of questions, least saving of visual tokens, and largest loss of accuracy of the budget `auto`."""
COST_SHARE, SPEEDUP = 0.15, 2.5


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of a relevance decision, as means or medians over images, in seconds.

    survey: texture, and the two ways of knowing that need no question.
    view: the encoder's part of the look, on the small view of the whole image.
    decoder: the decoder's part of the look.
    planning: tensions, the participatory map, balancing, attending and layout.
    reused: share of the images whose layout begins with the view of the look, so that its tokens are encoded
        for the decoder as well.
    """

    survey: float
    view: float
    decoder: float
    planning: float
    reused: float

    @property
    def total(self) -> float:
        """The work that there is for the decision alone: a view that the decoder gets is not counted."""
        return self.survey + self.view * (1 - self.reused) + self.decoder + self.planning


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and its result.

    met: None if the run did not measure it.
    """

    target: str
    result: str
    met: bool | None


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page after the comparison of methods."""

    title: str
    text: str


def verdicts(sweep: Sweep, cost: Cost) -> list[Verdict]:
    return [
        _loss(sweep),
        *(_least_right(sweep, setting, least) for setting, least in LEAST_RIGHT.items()),
        *(_win(sweep, share, rival) for share in (0.25, 0.1) for rival in RIVALS),
        _not_behind(sweep),
        *(_automatic(sweep, *target) for target in AUTOMATIC_TARGETS),
        _speedup(sweep),
        _decision_cost(sweep, cost),
    ]


def report(
    sweep: Sweep,
    cost: Cost,
    head: str,
    chart: str,
    others: Sequence[Verdict] = (),
    sections: Sequence[Section] = (),
) -> str:
    """The Markdown text of a run: the first paragraph, targets, the sections, chart, and all tables.

    chart: path of the chart, relative to the document.
    others: results of targets that do not follow from the sweep; they come first.
    sections: parts of the page between the targets and the comparison of methods.
    """
    rows = [
        ["target", "result", ""],
        *([one.target, one.result, WORDS[one.met]] for one in (*others, *verdicts(sweep, cost))),
    ]
    return "\n\n".join(
        (
            head,
            aligned_markdown(rows),
            MEANING_OF_MET,
            *(f"## {section.title}\n\n{section.text}" for section in sections),
            "## Time of the decision",
            _decision_times(sweep, cost),
            "## Accuracy against tokens",
            f"![accuracy against visual tokens and first tokens]({chart})",
            sweep_text(sweep, aligned_markdown),
        )
    )


def body(sweep: Sweep, cost: Cost, others: Sequence[Verdict] = ()) -> Mapping[str, Any]:
    """The results as a JSON object. others: as for `report`."""
    judged = (*others, *verdicts(sweep, cost))
    return {
        "verdicts": [{"target": v.target, "found": v.result, "met": v.met} for v in judged],
        "cost_ms": {name: 1e3 * getattr(cost, name) for name in ("survey", "view", "decoder", "planning")},
        "view_reused": cost.reused,
        **sweep.body(),
    }


def _loss(sweep: Sweep) -> Verdict:
    target = (
        f"{HALF.name}, all questions: at most {100 * LOST:.1f} points below full, with an interval that "
        "includes 0"
    )
    if HALF not in sweep.settings:
        return Verdict(target, "-", None)
    paired = sweep.compare(HALF, FULL).counts
    return Verdict(target, difference(paired), paired.difference >= -LOST and not paired.worse)


def _least_right(sweep: Sweep, setting: Setting, least: float) -> Verdict:
    target = f"{setting.name}, all questions: at least {100 * least:g}% right"
    if setting not in sweep.settings:
        return Verdict(target, "-", None)
    score = sweep.score(setting)
    result = f"{100 * score.accuracy:.1f}% ({points(score.low, score.high)})"
    return Verdict(target, result, score.accuracy >= least)


def _win(sweep: Sweep, share: float, rival: str) -> Verdict:
    first, second = Setting(RELEVANCE, share), Setting(rival, share)
    target = f"{first.name} is ahead of {rival} beyond the interval, all questions"
    if not {first, second} <= set(sweep.settings):
        return Verdict(target, "-", None)
    paired = sweep.compare(first, second).counts
    return Verdict(target, difference(paired), paired.better)


def _not_behind(sweep: Sweep) -> Verdict:
    target = f"{HALF.name} is behind no other method beyond the interval, all questions"
    rivals = sweep.rivals(HALF) if HALF in sweep.settings else ()
    if not rivals:
        return Verdict(target, "-", None)
    compared = {rival: sweep.compare(HALF, rival).counts for rival in rivals}
    behind = [rival for rival, paired in compared.items() if paired.worse]
    closest = min(compared, key=lambda rival: compared[rival].difference)
    shown = behind or [closest]
    words = "behind" if behind else "the best of them:"
    result = "; ".join(f"{rival.method}: {difference(compared[rival])}" for rival in shown)
    return Verdict(target, f"{words} {result}", not behind)


def _automatic(sweep: Sweep, group: str, saving: float, lost: float) -> Verdict:
    loss = f"at most {100 * lost:.1f} points below full, with an interval that includes 0"
    questions = "all questions" if group == ALL else group
    target = (
        f"{AUTOMATIC.name}, {questions}: at least {100 * saving:.0f}% fewer "
        f"visual tokens than full, {loss if lost else 'with no loss'}"
    )
    if AUTOMATIC not in sweep.settings or group not in sweep.groups:
        return Verdict(target, "-", None)
    kept = sweep.score(AUTOMATIC, group).tokens / sweep.score(FULL, group).tokens
    paired = sweep.compare(AUTOMATIC, FULL, group).counts
    met = 1 - kept >= saving and paired.difference >= -lost and not paired.worse
    return Verdict(target, f"{100 * (1 - kept):.0f}% fewer; {difference(paired)}", met)


def _saved(sweep: Sweep) -> float:
    """Seconds of encoder time that relevance saves; all its work in the encoder is counted."""
    return sweep.time(FULL).encode - sweep.time(HALF).encode


def _decision_cost(sweep: Sweep, cost: Cost) -> Verdict:
    target = (
        f"survey, look and planning take less than {COST_SHARE:.0%} of the encoder time that is saved at 0.5 "
        "of the tokens"
    )
    if HALF not in sweep.settings:
        return Verdict(target, "-", None)
    saved = _saved(sweep)
    if saved <= 0:
        return Verdict(target, f"nothing saved: {1e3 * saved:.1f} ms", False)
    share = cost.total / saved
    return Verdict(target, f"{share:.1%}: {1e3 * cost.total:.1f} of {1e3 * saved:.1f} ms", share < COST_SHARE)


def _speedup(sweep: Sweep) -> Verdict:
    target = f"first token at least {SPEEDUP:g}x sooner at 0.5 of the tokens, {sweep.timed_on}"
    if HALF not in sweep.settings:
        return Verdict(target, "-", None)
    full, half = sweep.time(FULL).ttft, sweep.time(HALF).ttft
    return Verdict(
        target, f"{full / half:.2f}x: {1e3 * half:.0f} instead of {1e3 * full:.0f} ms", full >= SPEEDUP * half
    )


def _decision_times(sweep: Sweep, cost: Cost) -> str:
    rows = [
        ["step", "ms"],
        ["survey: texture, and the two maps that need no question", f"{1e3 * cost.survey:.1f}"],
        ["look: the encoder on the small view of the whole image", f"{1e3 * cost.view:.1f}"],
        ["look: the decoder's first layers on that view and the question", f"{1e3 * cost.decoder:.1f}"],
        ["planning: tensions, participatory map, balancing, layout", f"{1e3 * cost.planning:.1f}"],
        ["for the decision alone", f"{1e3 * cost.total:.1f}"],
    ]
    about = (
        f"Medians over {sweep.timed_on}, one image at a time, with empty caches. In {cost.reused:.0%} of "
        "these images the layout begins with the small view, so the decoder gets its tokens, and the view is "
        "not work for the decision alone."
    )
    return f"{about}\n\n{aligned_markdown(rows)}"
