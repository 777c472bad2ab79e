"""fovea usage: usage and costs by tenant, model, backend or day, from a gateway's usage file."""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fovea.cli.text import aligned, fitted
from fovea.core.errors import ConfigError
from fovea.gateway.usage.log import COUNTS, GROUPS, MONEY, Report, Row, fields_of, read_usage

HOUR_S = 3600
_AGO = re.compile(r"(\d{1,5})([dh])")


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "usage",
        description="Print what was used and what it cost, from the usage file of a gateway, which may be "
        "running. All times are UTC. The credit is what the requests would have cost more without caches. "
        "The cost per image is the part of the cost that images cause, divided by their number.",
    )
    parser.add_argument(
        "--file",
        type=Path,
        default=Path(os.environ.get("FOVEA_USAGE_FILE") or "usage.db"),
        metavar="FILE",
        help="the usage file (default: FOVEA_USAGE_FILE, else usage.db)",
    )
    parser.add_argument(
        "--by",
        default="tenant",
        metavar="NAMES",
        help=f"what the rows are, one or several with commas: {', '.join(GROUPS)} (default: tenant)",
    )
    parser.add_argument(
        "--since",
        default="30d",
        metavar="TIME",
        help="first day or hour, as 2027-01-31 or 2027-01-31T08, or how long ago, as 7d or 24h "
        "(default: 30d)",
    )
    parser.add_argument("--until", metavar="TIME", help="last day or hour, which is included (default: now)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON; money in units of the currency")
    form.add_argument("--csv", action="store_true", help="print CSV; money in units of the currency")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    by = _groups(args.by)
    now_s = time.time()
    since = _hour("--since", args.since, now_s, end=False)
    until = int(now_s // HOUR_S) + 1 if args.until is None else _hour("--until", args.until, now_s, end=True)
    if until <= since:
        raise ConfigError(
            f"--until is before --since: no hour is from {_shown(since)} to {_shown(until)} (UTC)",
            param="until",
        )
    report = read_usage(args.file, by, since, until)
    if args.json:
        rows = [fields_of(row, by) for row in report.rows]
        values = {
            "currency": report.currency,
            "since": _shown(since),
            "until": _shown(until),
            "by": by,
            "rows": rows,
            "total": fields_of(report.total, ()),
        }
        print(json.dumps(values, indent=2))
    elif args.csv:
        _print_csv(report, by)
    else:
        _print_table(report, by, f"usage from {_shown(since)} to {_shown(until)} (UTC), in {report.currency}")
    return 0


def _groups(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in GROUPS or names.count(name) > 1:
            raise ConfigError(
                f"--by has {name!r}; accepted: {', '.join(GROUPS)}, each once, as tenant,day", param="by"
            )
    return names


def _hour(flag: str, text: str, now_s: float, *, end: bool) -> int:
    """Return the hour since the epoch at which a period begins, or after which it ends."""
    ago = _AGO.fullmatch(text)
    if ago:
        hours = int(ago[1]) * (24 if ago[2] == "d" else 1)
        return int(now_s // HOUR_S) - hours + end
    for layout, hours in (("%Y-%m-%d", 24), ("%Y-%m-%dT%H", 1)):
        try:
            at = datetime.datetime.strptime(text, layout).replace(tzinfo=datetime.UTC)
        except ValueError:
            continue
        return int(at.timestamp() // HOUR_S) + (hours if end else 0)
    raise ConfigError(
        f"{flag} is {text!r}; accepted: a day, as 2027-01-31, an hour, as 2027-01-31T08, or how long ago, as "
        "7d or 24h",
        param=flag[2:],
    )


def _shown(hour: int) -> str:
    try:
        at = datetime.datetime.fromtimestamp(hour * HOUR_S, datetime.UTC)
    except (OverflowError, ValueError):
        return f"hour {hour} of the epoch"
    return at.strftime("%Y-%m-%d %H:00")


def _print_csv(report: Report, by: Sequence[str]) -> None:
    writer = csv.DictWriter(sys.stdout, [*by, *COUNTS, *MONEY, "seconds", "currency"], lineterminator="\n")
    writer.writeheader()
    for row in report.rows:
        fields = fields_of(row, by)
        money = {name: f"{fields[name]:.6f}" for name in MONEY}
        writer.writerow({**fields, **money, "currency": report.currency})


def _print_table(report: Report, by: Sequence[str], title: str) -> None:
    if not report.rows:
        print(f"no {title}")
        return
    rows = [[" ".join(by).replace("_", " "), *_cells(report.total)]]
    rows += [[" ".join(map(_printable, row.group)), *_cells(row).values()] for row in report.rows]
    if len(report.rows) > 1:
        rows.append(["all", *_cells(report.total).values()])
    print(fitted(title))
    print(aligned(rows))
    if report.total.estimated:
        count = f"{report.total.estimated:,}"
        print(fitted(f"{count} requests are estimates: their backends reported no token counts."))


def _cells(row: Row) -> dict[str, str]:
    """Return the numbers of a row by the headings of their columns."""
    return {
        "requests": f"{row.requests:,}",
        "errors": f"{row.errors:,}",
        "images": f"{row.images:,}",
        "prompt": f"{row.prompt_tokens:,}",
        "visual": f"{row.visual_tokens:,}",
        "cached": f"{row.cached_tokens:,}",
        "output": f"{row.completion_tokens:,}",
        "cost": f"{row.cost / 1e6:,.2f}",
        "credit": f"{row.credit / 1e6:,.2f}",
        "per request": f"{row.cost_per_request / 1e6:,.6f}",
        "per image": f"{row.cost_per_image / 1e6:,.6f}",
    }


def _printable(text: str) -> str:
    """Replace characters that would change the terminal's state, and show that nothing is there."""
    return "".join(char if char.isprintable() else "?" for char in text) or "-"
