"""Judge a sweep over pages by its targets, and print it beside the one over scenes as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fovea.cli.sweep.report import difference, markdown, table
from fovea.evaluation.sweep import ALL, FULL, RELEVANCE, Setting, Sweep
from relevance_ablation import Ablation, ablation_table
from relevance_page import MEANING_OF_MET, WORDS, Cost, Verdict, decision_times

BEGIN = "<!-- documents measured by make bench-relevance DOCUMENTS=1 -->"
END = "<!-- end of what was measured on documents -->"
METHODS = ("resize", "uniform", "random", "dart", "dpp", RELEVANCE)
SHARES = (0.5, 0.25)
HALF, QUARTER = (Setting(RELEVANCE, share) for share in SHARES)
LOST = {HALF: 0.005, QUARTER: 0.03}
"""Largest losses of accuracy against all tokens."""
SPEEDUP = 3.0
"""How many times sooner the first token has to come at a quarter of the tokens."""


def verdicts(sweep: Sweep) -> list[Verdict]:
    rivals = [method for method in METHODS if method != RELEVANCE]
    return [
        _loss(sweep, HALF, "and the interval includes 0 or more"),
        _loss(sweep, QUARTER),
        *(
            _win(sweep, Setting(RELEVANCE, share), Setting(rival, share))
            for share in SHARES
            for rival in rivals
        ),
        _speedup(sweep),
    ]


def report(sweep: Sweep, cost: Cost, rows: Sequence[Ablation], head: str, chart: str, scenes: Path) -> str:
    """The Markdown text of a run: first paragraph, targets, both materials, chart, all tables, ablations.

    chart: path of the chart, relative to the document. scenes: JSON of a run over scenes; it may be missing.
    """
    judged = [["target", "result", ""], *([v.target, v.result, WORDS[v.met]] for v in verdicts(sweep))]
    both = (
        "Scenes (fovea-tiny) and pages (fovea-page) side by side; differences are against all tokens:",
        table(side_by_side(sweep, json.loads(scenes.read_text()) if scenes.exists() else None)),
    )
    parts = [
        head,
        table(judged),
        MEANING_OF_MET,
        *both,
        decision_times(sweep, cost),
        f"![accuracy against visual tokens and first tokens, on pages]({chart})",
        markdown(sweep),
    ]
    if rows:
        parts += [
            'Relevance with parts changed. "Shown" is the share of cells with the answer that are encoded at '
            "full resolution, on pages of 512 tokens or more. Differences are against the first row:",
            ablation_table(rows),
        ]
    return "\n\n".join(parts)


def side_by_side(sweep: Sweep, scenes: Mapping[str, Any] | None) -> list[list[str]]:
    """Accuracy and loss of every setting on both materials, and times to the first token.

    scenes: the JSON that a run over scenes has written; None: there is none, and its columns are "-".
    """
    settings = {one["name"]: one for one in scenes["settings"]} if scenes else {}
    losses = {
        one["first"]: one
        for one in (scenes["comparisons"] if scenes else ())
        if one["second"] == FULL.name and one["group"] == ALL
    }
    rows = [["setting", "scenes, %", "difference", "TTFT, ms", "pages, %", "difference", "TTFT, ms"]]
    for setting in sweep.settings:
        one, loss = settings.get(setting.name), losses.get(setting.name)
        theirs = ["-", "-", "-"]
        if one is not None:
            theirs[0] = f"{100 * one['scores'][-1]['accuracy']:.1f}"
            theirs[2] = f"{one['timed']['ttft_ms']:.0f}"
        if loss is not None:
            ends = loss["difference"], loss["low"], loss["high"]
            theirs[1] = "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * end for end in ends))
        mine = "-" if setting == FULL else difference(sweep.compare(setting, FULL).counts).partition(",")[0]
        accuracy, ttft = sweep.score(setting).accuracy, sweep.time(setting).ttft
        rows.append([setting.name, *theirs, f"{100 * accuracy:.1f}", mine, f"{1e3 * ttft:.0f}"])
    return rows


def body(sweep: Sweep, cost: Cost, rows: Sequence[Ablation]) -> Mapping[str, Any]:
    """The results as a JSON object."""
    return {
        "verdicts": [{"target": v.target, "found": v.result, "met": v.met} for v in verdicts(sweep)],
        "cost_ms": {name: 1e3 * seconds for name, seconds in asdict(cost).items()},
        "ablations": [{**asdict(row), "right": sum(row.right), "cases": len(row.right)} for row in rows],
        **sweep.body(),
    }


def _loss(sweep: Sweep, setting: Setting, also: str = "") -> Verdict:
    most = LOST[setting]
    target = f"{setting.name}: at most {100 * most:.1f} points below full" + (also and f", {also}")
    if setting not in sweep.settings:
        return Verdict(target, "-", None)
    paired = sweep.compare(setting, FULL).counts
    met = paired.difference >= -most and not (also and paired.worse)
    return Verdict(target, difference(paired), met)


def _win(sweep: Sweep, mine: Setting, rival: Setting) -> Verdict:
    target = f"{mine.name} is better than {rival.method} by more than the interval"
    if not {mine, rival} <= set(sweep.settings):
        return Verdict(target, "-", None)
    paired = sweep.compare(mine, rival).counts
    return Verdict(target, difference(paired), paired.better)


def _speedup(sweep: Sweep) -> Verdict:
    target = f"first token at least {SPEEDUP:g}x sooner at 0.25 of the tokens, {sweep.timed_on}"
    if QUARTER not in sweep.settings:
        return Verdict(target, "-", None)
    full, quarter = sweep.time(FULL).ttft, sweep.time(QUARTER).ttft
    result = f"{full / quarter:.2f}x: {1e3 * quarter:.0f} instead of {1e3 * full:.0f} ms"
    return Verdict(target, result, full >= SPEEDUP * quarter)
