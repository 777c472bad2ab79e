"""fovea doctor [URL|MODEL]: the production checklist as real checks, each with the figure found and its fix.

  fovea doctor                        this machine, and the bundled model
  fovea doctor MODEL --config FILE    a model with the settings of its server;
                                      doctor starts servers of its own, loads
                                      them, kills them and starts them again
  fovea doctor http://HOST:PORT       a live server: it is read, and gets a
                                      few small requests
  fovea doctor URL --destructive      the same, with load up to its saturation

Exit status: 0 no check failed, 1 a check failed (with --strict: or warned), 2 wrong arguments.
docs/doctor.md describes every check.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from fovea.cli import options
from fovea.cli.text import HelpFormatter, list_line, terminal_columns, wrapped
from fovea.doctor.check import GROUPS, Check, Result, Status, counts
from fovea.doctor.load import DoctorSettings


def register(commands: Any) -> None:
    parser = commands.add_parser("doctor", description=__doc__, usage="fovea doctor [OPTIONS] [URL|MODEL]")
    parser.formatter_class = HelpFormatter
    parser.add_argument(
        "target", nargs="?", metavar="URL|MODEL",
        help="a live server, or a folder or hub id of a checkpoint (default: fovea-tiny)",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="leave out the checks that load a server and break things"
    )
    parser.add_argument(
        "--destructive", action="store_true",
        help="with a URL: also load the live server up to its saturation, and send it faulty requests",
    )  # fmt: skip
    only = parser.add_argument(
        "--only", action="append", default=[], metavar="NAME",
        help="a group or GROUP/CHECK; may be given several times",
    )  # fmt: skip
    options.accepts(only, GROUPS)
    parser.add_argument("--list", action="store_true", help="list the checks, and make none")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings, too")
    _add_places(parser)
    options.add_options(parser, "load and requests", DoctorSettings)
    parser.set_defaults(run=run)


def _add_places(command: argparse.ArgumentParser) -> None:
    """Add the flags that say where things are, and by which keys they open."""
    parser = command.add_argument_group("places and keys")
    parser.add_argument(
        "--config", metavar="FILE",
        help="TOML file of the server's settings, which are judged, too; FOVEA_* overrides it",
    )  # fmt: skip
    parser.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit of a hub id in the local cache"
    )
    parser.add_argument("--mmproj", metavar="FILE", help="the vision tower of a model in a GGUF file")
    for name, paths in (("api", "/v1"), ("admin", "/admin"), ("metrics", "/metrics")):
        parser.add_argument(
            f"--{name}-key", action="append", metavar="KEY",
            help=f"key of the server for {paths} (or FOVEA_{name.upper()}_KEY)",
        )  # fmt: skip
    parser.add_argument(
        "--prometheus", default="", metavar="URL", help="ask this Prometheus about the server"
    )
    parser.add_argument(
        "--grafana", default="", metavar="URL",
        help="ask this Grafana for the dashboards (FOVEA_GRAFANA_TOKEN: its token)",
    )  # fmt: skip
    parser.add_argument("--sla", metavar="FILE", help="targets of latency, as for fovea bench")


def run(args: argparse.Namespace) -> int:
    """Make the checks and print their verdicts. Returns the exit status."""
    from fovea.doctor.check import select
    from fovea.doctor.checks import CHECKS

    checks = select(CHECKS, args.only, quick=args.quick)
    if args.list:
        print(json.dumps([_as_json(check) for check in checks]) if args.json else listing(checks))
        return 0
    from fovea.cli.doctor_subject import wired
    from fovea.doctor.check import counts, examine, exit_status

    with ended_by_signals(), wired(args) as subject, Progress() as progress:
        results = examine(checks, subject, progress.begin)
    if args.json:
        body = {
            "fovea_doctor": 1,
            "target": subject.name,
            "counts": {str(status): count for status, count in counts(results).items()},
            "results": [result.as_json() for result in results],
        }
        print(json.dumps(body))
    else:
        print(table(results))
    return exit_status(results, strict=args.strict)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a terminal that closes, end the block as Ctrl-C does.

    Otherwise a server would be left behind. Signals that are ignored, as by nohup, stay so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGHUP)}
    for name, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(name, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler or signal.SIG_DFL)


def listing(checks: list[Check]) -> str:
    """Return a line for every check: its path, its subject, and the question that it answers."""
    width = max((len(check.path) for check in checks), default=0)
    return list_line("\n".join(f"{check.path:{width}}  {_question(check)}" for check in checks))


def _question(check: Check) -> str:
    return (check.run.__doc__ or check.title).splitlines()[0]


def _as_json(check: Check) -> dict[str, str]:
    return {"check": check.path, "title": check.title, "question": _question(check)}


WIDEST = 110
"""Columns of the longest line on a wide terminal; longer lines are hard to read."""
WORDS = {Status.PASS: "pass", Status.WARN: "WARN", Status.FAIL: "FAIL", Status.NOT_APPLICABLE: "n/a"}
INDENT = " " * 9


def table(results: Sequence[Result]) -> str:
    """Return the verdicts by group, with reasons and fixes, and a last line with their numbers."""
    return "\n".join(_lines(results))


def _lines(results: Sequence[Result]) -> Iterator[str]:
    for group, members in groupby(results, lambda result: result.check.group):
        yield group
        for result in members:
            yield from _result(result)
    numbers = ", ".join(f"{count} {status}" for status, count in counts(results).items())
    yield ""
    yield f"{numbers}; {sum(result.seconds for result in results):.0f} s"


def _result(result: Result) -> Iterator[str]:
    verdict, width = result.verdict, min(WIDEST, terminal_columns())
    head = f"  {WORDS[verdict.status]:<5}{result.check.name}: "
    yield from wrapped(verdict.figure or verdict.reason, width, head, INDENT)
    if verdict.figure and verdict.reason:
        yield from wrapped(verdict.reason, width, INDENT)
    if verdict.fix:
        yield from wrapped(verdict.fix, width, f"{INDENT}fix: ", INDENT)


class Progress:
    """The name of the check that is being made, on stderr, if stderr is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self._status = Console(stderr=True).status("") if sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def begin(self, check: Check) -> None:
        """Show the name of a check."""
        if self._status is not None:
            self._status.update(check.path)
