"""A sweep of benchmarks/relevance.py judged by its targets, and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fovea.cli.sweep.report import difference, markdown, table
from fovea.evaluation.sweep import DETAILS, FULL, OTHERS, RELEVANCE, Setting, Sweep

WORDS = {True: "met", False: "**missed**", None: "not measured"}
BEGIN, END = "<!-- measured by make bench-relevance -->", "<!-- end of what was measured -->"
"""What is between them in a document is a run's."""
HALF = Setting(RELEVANCE, 0.5)
RIVALS, SHARES = ("resize", "uniform", "random", "dart"), (0.5, 0.25)
LOST, LOST_MILD = 0.01, 0.005
"""Of accuracy, at most: of relevance at a half, and of methods at three quarters of the tokens."""
MILD = (Setting("dart", 0.75), Setting("dpp", 0.75))
COST_SHARE, SPEEDUP = 0.15, 1.5


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds, medians.

    survey: texture and the two ways of knowing that need no question. first_view: the encoder on the view of
        the whole, whose tokens are among those that the decoder gets, so that it is no cost of deciding.
        planning: tensions, coupling, balancing, attending and laying out.
    """

    survey: float
    first_view: float
    planning: float

    @property
    def total(self) -> float:
        return self.survey + self.planning


@dataclass(frozen=True, slots=True)
class Verdict:
    """met: None where the run left out what it is about."""

    target: str
    found: str
    met: bool | None


def verdicts(sweep: Sweep, cost: Cost) -> list[Verdict]:
    return [
        _loses(sweep, HALF, LOST),
        *(_beats(sweep, share, rival) for share in SHARES for rival in RIVALS),
        _cheap(sweep, cost),
        _fast(sweep),
        *(_loses(sweep, setting, LOST_MILD) for setting in MILD),
    ]


def measured(sweep: Sweep, cost: Cost, head: str, chart: str) -> str:
    """For a document: how it was measured, targets, chart (its path from there), and all tables."""
    judged = [
        ["target", "found", ""],
        *([one.target, one.found, WORDS[one.met]] for one in verdicts(sweep, cost)),
    ]
    picture = f"![accuracy against visual tokens and first tokens]({chart})"
    return "\n\n".join((head, table(judged), _deciding(sweep, cost), picture, markdown(sweep)))


def written_into(text: str, found: str) -> str:
    """A document with what was found between its marks. Raises ValueError where it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{found}\n{END}{after}"


def body(sweep: Sweep, cost: Cost) -> Mapping[str, Any]:
    """For JSON."""
    return {
        "verdicts": [{"target": v.target, "found": v.found, "met": v.met} for v in verdicts(sweep, cost)],
        "cost_ms": {
            "survey": 1e3 * cost.survey, "first_view": 1e3 * cost.first_view, "planning": 1e3 * cost.planning,
        },
        **sweep.body(),
    }  # fmt: skip


def _loses(sweep: Sweep, setting: Setting, most: float) -> Verdict:
    target = f"{setting.name}, of all kinds: at most {100 * most:.1f} points below full"
    if setting not in sweep.settings:
        return Verdict(target, "-", None)
    paired = sweep.compare(setting, FULL).counts
    return Verdict(target, difference(paired), paired.difference >= -most)


def _beats(sweep: Sweep, share: float, rival: str) -> Verdict:
    first, second = Setting(RELEVANCE, share), Setting(rival, share)
    target = (
        f"{first.name} is better than {rival} on small details by more than the interval, on others not worse"
    )
    if not {first, second} <= set(sweep.settings) or DETAILS not in sweep.groups:
        return Verdict(target, "-", None)
    details, others = (sweep.compare(first, second, group).counts for group in (DETAILS, OTHERS))
    found = f"{difference(details)}; others {difference(others)}"
    return Verdict(target, found, details.better and not others.worse)


def _saved(sweep: Sweep) -> float:
    """Seconds that the encoder needs less, all that relevance does there counted."""
    return sweep.time(FULL).encode - sweep.time(HALF).encode


def _cheap(sweep: Sweep, cost: Cost) -> Verdict:
    target = f"scoring and planning below {COST_SHARE:.0%} of the encoder's time saved"
    if HALF not in sweep.settings:
        return Verdict(target, "-", None)
    saved = _saved(sweep)
    if saved <= 0:
        return Verdict(target, f"nothing saved: {1e3 * saved:.1f} ms", False)
    share = cost.total / saved
    return Verdict(target, f"{share:.1%}: {1e3 * cost.total:.1f} of {1e3 * saved:.1f} ms", share < COST_SHARE)


def _fast(sweep: Sweep) -> Verdict:
    target = f"first token at least {SPEEDUP:g}x faster at a half, {sweep.timed_on}"
    if HALF not in sweep.settings:
        return Verdict(target, "-", None)
    full, half = sweep.time(FULL).ttft, sweep.time(HALF).ttft
    return Verdict(
        target, f"{full / half:.2f}x: {1e3 * half:.0f} after {1e3 * full:.0f} ms", full >= SPEEDUP * half
    )


def _deciding(sweep: Sweep, cost: Cost) -> str:
    return (
        f"Deciding where to look, {sweep.timed_on}: survey {1e3 * cost.survey:.1f} ms, first view "
        f"{1e3 * cost.first_view:.1f} ms (its tokens are among those kept), planning {1e3 * cost.planning:.1f} ms."
    )
