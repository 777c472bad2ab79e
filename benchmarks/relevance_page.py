"""Judge a sweep of benchmarks/relevance.py by its targets, and print it as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fovea.cli.sweep import aligned, difference, sweep_markdown
from fovea.evaluation.sweep import DETAILS, FULL, OTHERS, RELEVANCE, Setting, Sweep

WORDS = {True: "met", False: "**missed**", None: "not measured"}
MEANING_OF_MET = (
    '"Met" means that the measured value reaches the target; its interval may extend beyond it. '
    'Only where a target says "by more than the interval", the whole interval has to reach it.'
)
HALF = Setting(RELEVANCE, 0.5)
RIVALS, SHARES = ("resize", "uniform", "random", "dart"), (0.5, 0.25)
LOST, LOST_MILD = 0.01, 0.005
"""Largest loss of accuracy: of relevance at 0.5 of the tokens, and of methods at 0.75 of the tokens."""
MILD = (Setting("dart", 0.75), Setting("dpp", 0.75))
COST_SHARE, SPEEDUP = 0.15, 1.5


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of a relevance decision, as medians in seconds.

    survey: texture, and the two ways of knowing that need no question.
    first_view: the encoder on the view of the whole image. It is not counted as a cost of the decision,
        because the decoder gets the tokens of this view.
    planning: tensions, coupling, balancing, attending and layout.
    """

    survey: float
    view: float
    decoder: float
    planning: float

    @property
    def total(self) -> float:
        return self.survey + self.planning


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and its result.

    met: None if the run did not measure it.
    """

    target: str
    result: str
    met: bool | None


def verdicts(sweep: Sweep, cost: Cost) -> list[Verdict]:
    return [
        _loss(sweep, HALF, LOST),
        *(_win(sweep, share, rival) for share in SHARES for rival in RIVALS),
        _decision_cost(sweep, cost),
        _speedup(sweep),
        *(_loss(sweep, setting, LOST_MILD) for setting in MILD),
    ]


def report(sweep: Sweep, cost: Cost, head: str, chart: str) -> str:
    """The Markdown text of a run: the first paragraph, targets, chart, and all tables.

    chart: path of the chart, relative to the document.
    """
    rows = [
        ["target", "result", ""],
        *([one.target, one.result, WORDS[one.met]] for one in verdicts(sweep, cost)),
    ]
    picture = f"![accuracy against visual tokens and first tokens]({chart})"
    return "\n\n".join(
        (head, aligned(rows), MEANING_OF_MET, _decision_times(sweep, cost), picture, sweep_markdown(sweep))
    )


def body(sweep: Sweep, cost: Cost) -> Mapping[str, Any]:
    """The results as a JSON object."""
    return {
        "verdicts": [{"target": v.target, "found": v.result, "met": v.met} for v in verdicts(sweep, cost)],
        "cost_ms": {
            "survey": 1e3 * cost.survey, "first_view": 1e3 * cost.first_view, "planning": 1e3 * cost.planning,
        },
        **sweep.body(),
    }  # fmt: skip


def _loss(sweep: Sweep, setting: Setting, most: float) -> Verdict:
    target = f"{setting.name}, all questions: at most {100 * most:.1f} points below full"
    if setting not in sweep.settings:
        return Verdict(target, "-", None)
    paired = sweep.compare(setting, FULL).counts
    return Verdict(target, difference(paired), paired.difference >= -most)


def _win(sweep: Sweep, share: float, rival: str) -> Verdict:
    first, second = Setting(RELEVANCE, share), Setting(rival, share)
    target = (
        f"{first.name} is better than {rival} on small details by more than the interval, "
        "and not worse on the others"
    )
    if not {first, second} <= set(sweep.settings) or DETAILS not in sweep.groups:
        return Verdict(target, "-", None)
    details, others = (sweep.compare(first, second, group).counts for group in (DETAILS, OTHERS))
    result = f"{difference(details)}; others {difference(others)}"
    return Verdict(target, result, details.better and not others.worse)


def _saved(sweep: Sweep) -> float:
    """Seconds of encoder time that relevance saves; all its work in the encoder is counted."""
    return sweep.time(FULL).encode - sweep.time(HALF).encode


def _decision_cost(sweep: Sweep, cost: Cost) -> Verdict:
    target = f"scoring and planning take less than {COST_SHARE:.0%} of the saved encoder time"
    if HALF not in sweep.settings:
        return Verdict(target, "-", None)
    saved = _saved(sweep)
    if saved <= 0:
        return Verdict(target, f"nothing saved: {1e3 * saved:.1f} ms", False)
    share = cost.total / saved
    return Verdict(target, f"{share:.1%}: {1e3 * cost.total:.1f} of {1e3 * saved:.1f} ms", share < COST_SHARE)


def _speedup(sweep: Sweep) -> Verdict:
    target = f"first token at least {SPEEDUP:g}x faster at 0.5 of the tokens, {sweep.timed_on}"
    if HALF not in sweep.settings:
        return Verdict(target, "-", None)
    full, half = sweep.time(FULL).ttft, sweep.time(HALF).ttft
    return Verdict(
        target, f"{full / half:.2f}x: {1e3 * half:.0f} instead of {1e3 * full:.0f} ms", full >= SPEEDUP * half
    )


def _decision_times(sweep: Sweep, cost: Cost) -> str:
    return (
        f"Time of the relevance decision, {sweep.timed_on}: survey {1e3 * cost.survey:.1f} ms, "
        f"first view {1e3 * cost.first_view:.1f} ms, planning {1e3 * cost.planning:.1f} ms. The survey reads "
        "texture and the two maps that need no question from the pixels. The first view is the encoder's "
        "work on the small view of the whole image; it is not counted as a cost of the decision, because the "
        "decoder gets its tokens. Planning is everything from the coupling with the question to the layout."
    )
