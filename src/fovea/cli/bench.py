"""fovea bench URL [WORKLOAD...]: measure any OpenAI-compatible server under load.

Fixed workloads, which run unless others are named:
  cold       one request about a new image: first token, decode rate
  images     8 at once, each about its own new image
  questions  8 at once about one new image
  followup   the next question of a conversation about an image
  known      a known image behind new text (encoder output cached, KV not)
  text       8 at once without images
  stall      the longest gap of a running stream while an image arrives
Loads:
  open       requests at --rate, whatever the server does (see --arrivals)
  closed     --clients; each sends its next request after its answer
  chat       conversations of --turns turns about an image
  trace      the requests of --trace FILE, at their times

  fovea bench http://127.0.0.1:8000
  fovea bench http://127.0.0.1:8000 open --rate 1,2,4 --plot load.png
  fovea bench http://127.0.0.1:8000 cold text --against yesterday.json

With --json, everything is printed as one JSON object instead. Exit code 1: a request
failed, or a target of --sla was missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fovea.bench.measure import Sample
from fovea.bench.settings import FIXED, LOADS, Price, Shape, Target, Traffic
from fovea.bench.sla import DEFAULT_SLA, read_sla
from fovea.cli import options
from fovea.cli.common import check_writable
from fovea.cli.text import HelpFormatter, fitted
from fovea.core.errors import ConfigError
from fovea.core.trace import read_trace

if TYPE_CHECKING:
    from fovea.bench.run import WorkloadResult
    from fovea.bench.session import Session, SessionResult


class BenchProgress:
    """A progress bar on stderr, if stderr is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
        )
        # The bar is drawn rarely, because drawing disturbs the time measurements of this process.
        self._bars = Progress(
            *columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), refresh_per_second=4
        )
        self._task = self._bars.add_task("connecting", total=None, status="")
        self._tokens = self._failed = 0

    def __enter__(self) -> BenchProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, name: str, total: int) -> None:
        self._tokens = self._failed = 0
        self._bars.reset(self._task, description=name, total=total or None, status="")

    def advance(self, sample: Sample) -> None:
        self._tokens += sample.output_tokens
        self._failed += not sample.succeeded
        self._bars.update(self._task, advance=1, status=f"{self._tokens} tokens, {self._failed} failed")


LOADED = ("open", "closed")
NEEDS: dict[str, tuple[str, ...]] = {
    "rate": ("open",), "arrivals": ("open",),
    "clients": ("closed", "chat"), "requests": (*LOADED, "chat"),
    "turns": ("chat",), "think": ("chat",),
    "text": LOADED, "images": LOADED, "zipf": LOADED, "images_per_request": LOADED, "system_tokens": LOADED,
    "concurrency": FIXED, "repeats": FIXED, "trace": ("trace",),
}  # fmt: skip
"""Flags that only some workloads use. With other workloads alone they are an error."""
IMPLIED = {"trace": "trace", "rate": "open", "turns": "chat", "clients": "closed"}
"""The workload that a flag implies if none is named."""


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "bench", description=__doc__, usage="fovea bench URL [WORKLOAD ...] [OPTIONS]"
    )
    parser.formatter_class = HelpFormatter
    parser.add_argument("url", metavar="URL", help="URL of the server; without a path, /v1 is added")
    words = parser.add_argument(
        "words", nargs="*", metavar="WORKLOAD", help=f"workloads: {', '.join((*FIXED, *LOADS))}"
    )
    options.accepts(words, (*FIXED, *LOADS))
    parser.add_argument(
        "--api-key", metavar="KEY", help="key of the server (FOVEA_API_KEY keeps it out of the process list)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="requests as JSON lines, see docs/simulator.md"
    )
    parser.add_argument(
        "--nonce",
        metavar="TEXT",
        help="makes the contents differ from those of other runs (default: a new one for each run)",
    )
    parser.add_argument(
        "--pid", type=int, metavar="N", help="process of the server on this machine, whose memory is measured"
    )
    parser.add_argument(
        "--sla", type=Path, metavar="FILE", help="targets, TOML or JSON (default: docs/benchmarking.md)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the results to a file, every request included"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw charts: .png, .svg or .pdf")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="earlier results, to which ratios are shown"
    )
    options.add_options(parser, "server", Target, skip=("url", "api_key"))
    options.add_options(parser, "prompts", Shape)
    options.add_options(parser, "loads", Traffic)
    options.add_options(parser, "costs", Price)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from fovea.bench import session as event_loop
    from fovea.bench.report import compare, read_results
    from fovea.bench.session import measure

    session = _read(args)
    before = read_results(args.against) if args.against else None
    with BenchProgress() as watch:
        findings = event_loop.run(measure(session, watch))
    body, results = findings.as_dict(), findings.results
    comparison: list[str] = []
    if before is not None:
        comparison, body["against"] = compare(body, before)
    _write(args, body, results)
    if args.json:
        print(json.dumps(body))
    else:
        _print(args, findings, comparison)
    missed = args.sla is not None and any(v.met is False for result in results for v in result.verdicts)
    return 1 if missed or any(result.summary.failed for result in results) else 0


def _print(args: argparse.Namespace, findings: SessionResult, comparison: Sequence[str]) -> None:
    from fovea.bench.report import format_result

    results = findings.results
    lines = [format_result(result) for result in results]
    if any(result.verdicts for result in results):
        lines.append(f"targets: {findings.session.sla.source}")
    lines += [f"note: {note}" for note in findings.dialect.notes]
    if (memory := findings.memory) is not None:
        lines.append(
            f"memory: {memory.peak_mib:.0f} MiB at most since its start, {memory.resident_mib:.0f} now, "
            f"{memory.processes} processes"
        )
    if comparison:
        lines += [f"against {args.against}:", *comparison]
    print(fitted("\n".join(lines)))


def _read(args: argparse.Namespace) -> Session:
    """Read and check the flags, before anything is measured. Raises ConfigError."""
    from fovea.bench.plot import check_plot
    from fovea.bench.session import Session

    names = _names(args)
    for flag, workloads in NEEDS.items():
        if getattr(args, flag) is not None and not set(workloads) & set(names):
            raise ConfigError(
                f"--{flag.replace('_', '-')} is for {', '.join(workloads)}; "
                f"the workloads are {', '.join(names)}",
                param=flag,
            )
    if "trace" in names and args.trace is None:
        raise ConfigError("the workload trace needs --trace FILE", param="trace")
    key = options.lookup("api_key", args, {})
    session = Session(
        target=options.settings(Target, args, {}, url=args.url, api_key=str(key[0]) if key else None),
        names=names,
        shape=options.settings(Shape, args, {}),
        traffic=options.settings(Traffic, args, {}),
        nonce=args.nonce or uuid.uuid4().hex[:8],
        sla=read_sla(args.sla) if args.sla else DEFAULT_SLA,
        price=options.settings(Price, args, {}),
        trace=read_trace(args.trace) if args.trace else None,
        pid=args.pid,
    )
    if args.plot:
        check_plot(args.plot)
    for path in filter(None, (args.out, args.plot)):
        check_writable(path)
    return session


def _names(args: argparse.Namespace) -> tuple[str, ...]:
    known = (*FIXED, *LOADS)
    for name in args.words:
        if name not in known:
            raise ConfigError(
                f"there is no workload {name!r}; accepted: {', '.join(known)}", param="workload"
            )
    implied = [name for flag, name in IMPLIED.items() if getattr(args, flag) is not None]
    return tuple(dict.fromkeys(args.words or implied[:1] or FIXED))


def _write(args: argparse.Namespace, body: dict[str, Any], results: Sequence[WorkloadResult]) -> None:
    from fovea.bench.plot import draw
    from fovea.bench.report import request_rows

    if args.out:
        pairs = zip(body["results"], results, strict=True)
        rows = [{**entry, "requests": request_rows(result)} for entry, result in pairs]
        args.out.write_text(json.dumps({**body, "results": rows}, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        draw(args.plot, results, f"{body['model']} at {body['url']}, {body['date']}")
