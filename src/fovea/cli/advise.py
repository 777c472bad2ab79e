"""fovea advise: which inference engine suits a situation, by rules with sources.

Fovea's own engine is one of eight, and is named only where it is the better
choice. `fovea gateway` works in front of any of them. docs/engine-advisor.md
lists the rules and tells how to use your own.

  fovea advise --device x86-cpu --strangers true
  fovea advise --device nvidia-gpu --several-devices true --sources
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fovea.cli import options
from fovea.cli.text import HelpFormatter
from fovea.planner.advisor import Advice, Recommendation, Rule, Situation

MOST_ENGINES, MOST_REASONS = 3, 2
"""Engines, and reasons for and against each, that are shown without sources."""
OWN = "Fovea"


def show_advice(advice: Recommendation, console: Console, *, sources: bool = False) -> None:
    """Print the engines, the best first. sources: print every reason, with its source and date."""
    best = " or ".join(advice.best) or "none of them"
    tie = " (the rules do not decide between them)" if advice.tie else ""
    console.print(f"\n[bold]Engine: {best}[/bold]{tie}")
    if sources:
        for one in advice.ranked:
            _with_sources(one, console)
    else:
        _in_short(advice, console)
    for note in advice.notes:
        console.print(f"note: {note}")


def advice_as_dict(advice: Recommendation) -> dict[str, Any]:
    """Return the advice as values of JSON."""
    return {
        "best": list(advice.best),
        "tie": advice.tie,
        "notes": list(advice.notes),
        "ranked": [
            {
                "engine": one.engine.name,
                "points": one.points,
                "ruled_out": _rules(one.ruled_out),
                "for": _rules(one.reasons_for),
                "against": _rules(one.reasons_against),
            }
            for one in advice.ranked
        ],
    }


def _in_short(advice: Recommendation, console: Console) -> None:
    table = Table("engine", "points", "for", "against", box=SIMPLE_HEAD, pad_edge=False)
    possible = [one for one in advice.ranked if not one.ruled_out]
    for one in possible[:MOST_ENGINES]:
        table.add_row(
            one.engine.name,
            str(one.points),
            "; ".join(rule.reason for rule in one.reasons_for[:MOST_REASONS]),
            "; ".join(rule.reason for rule in one.reasons_against[:MOST_REASONS]),
        )
    console.print(table)
    for one in advice.ranked:
        if one.ruled_out:
            console.print(f"ruled out: {one.engine.name}: {one.ruled_out[0].reason}")
    own = next((one for one in possible[MOST_ENGINES:] if one.engine.name == OWN), None)
    if own is not None:
        against = "; ".join(rule.reason for rule in own.reasons_against)
        console.print(f"{OWN} itself has {own.points} points: {against}")


def _with_sources(one: Advice, console: Console) -> None:
    points = "ruled out" if one.ruled_out else f"{one.points} points"
    console.print(f"[bold]{one.engine.name}[/bold]: {points}")
    for title, rules in (
        ("ruled out", one.ruled_out), ("for", one.reasons_for), ("against", one.reasons_against),
    ):  # fmt: skip
        for rule in rules:
            console.print(f"  {title}: {rule.reason} ({rule.points:+d}; {rule.url}, {rule.date})")


def _rules(rules: Iterable[Rule]) -> list[dict[str, Any]]:
    return [
        {"reason": rule.reason, "points": rule.points, "url": rule.url, "date": rule.date.isoformat()}
        for rule in rules
    ]


def register(commands: Any) -> None:
    parser = commands.add_parser("advise", description=__doc__, usage="fovea advise [SITUATION] [OPTIONS]")
    parser.formatter_class = HelpFormatter
    options.add_options(parser, "situation", Situation)
    parser.add_argument("--rules", type=Path, metavar="FILE", help="your own rules (docs/engine-advisor.md)")
    parser.add_argument("--sources", action="store_true", help="print every reason with its source and date")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from fovea.planner.advisor import advise, read_advice

    situation = options.flag_settings(Situation, args)
    found = advise(situation, advice=read_advice(args.rules) if args.rules else None)
    if args.json:
        print(json.dumps(advice_as_dict(found)))
    else:
        show_advice(found, Console(file=sys.stdout, highlight=False), sources=args.sources)
    return 0 if found.best else 1
