"""Measure what HTTP proxies in front of engines cost, side by side.

    python benchmarks/gateway/cost.py [--quick] [--proxies bare,gateway,envoy,nginx,haproxy,smg] [--page FILE]
    python benchmarks/gateway/cost.py --plug 'mine=my-proxy --port {port} {backends}'

All proxies run at the same time, and are measured one after the other in each round, so that noise of the
machine hits all alike. SMG and HAProxy are installed into .venv-gateway-peers on the first run. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cost_page import PAGE, Footprint, machine, tables
from cost_rows import BUSY, DIRECT, TARGETS, Slice, clocks_differ_s, rows
from load import Order
from payloads import KINDS
from processor_time import Usage
from proxies import NAMES, Proxy, SetupError, load, of_command
from running import Generator, Program, ask, backends, running

BACKENDS = 2


@dataclass(frozen=True)
class Plan:
    """The measurements of a run.

    proxies: what is compared with the direct way.
    kinds: names of the kinds of requests.
    rounds: how often each measurement is repeated.
    seconds: duration of one measurement.
    proxy_cores, load_cores: cores of a proxy, and of everything else. Both are empty if nothing is pinned.
    """

    proxies: Sequence[Proxy]
    kinds: Sequence[str]
    rounds: int
    seconds: float
    proxy_cores: Sequence[int]
    load_cores: Sequence[int]


@dataclass
class Idle:
    """Processor time of a proxy between its measurements.

    cpu_s: processor time.
    seconds: time.
    since: time and processor time at the end of its last measurement.
    """

    cpu_s: float = 0.0
    seconds: float = 0.0
    since: tuple[float, float] | None = None

    @property
    def per_second_ms(self) -> float:
        """Milliseconds of processor time per second."""
        return self.cpu_s / self.seconds * 1e3 if self.seconds else 0.0

    def begin(self, cpu_s: float) -> None:
        self.since = (time.monotonic(), cpu_s)

    def end(self, cpu_s: float) -> None:
        if self.since:
            self.seconds += time.monotonic() - self.since[0]
            self.cpu_s += cpu_s - self.since[1]


@dataclass
class Run:
    """A comparison in progress.

    urls: base URL of each way to the backends, by name; the direct way is the first.
    """

    plan: Plan
    backends: Sequence[str]
    generator: Generator
    urls: dict[str, str]
    programs: dict[str, Program]
    slices: list[Slice] = field(default_factory=list)
    idle: dict[str, Idle] = field(default_factory=dict)

    def warm_up(self) -> dict[str, Usage]:
        """Send every kind of request through every proxy, and return what the proxies use then."""
        for kind in self.plan.kinds:
            for url in self.urls.values():
                self.generator.carry_out(Order(url, kind, requests=16, connections=4))
        return {name: program.usage() for name, program in self.programs.items()}

    def measure(self) -> None:
        names = list(self.urls)
        for turn in range(self.plan.rounds):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            for kind in self.plan.kinds:
                for url in self.backends:
                    ask(url, "/behaviour", json.dumps({"gap_ms": KINDS[kind].gap_ms}))
                for open_loop in (False, True):
                    for name in order:
                        self.slices.append(self._slice(name, kind, open_loop, turn))
            print(f"round {turn + 1} of {self.plan.rounds}", file=sys.stderr, flush=True)

    def _slice(self, name: str, kind: str, open_loop: bool, turn: int) -> Slice:
        rate = KINDS[kind].rate if open_loop else 0.0
        order = Order(self.urls[name], kind, self.plan.seconds, rate=rate)
        program = self.programs.get(name)
        nothing = Usage(0.0, 0.0, 0, 0, 0.0)
        before = program.usage() if program else nothing
        idle = self.idle.setdefault(name, Idle())
        idle.end(before.clock_s)
        result = self.generator.carry_out(order)
        after = program.usage() if program else nothing
        idle.begin(after.clock_s)
        return Slice(
            name, kind, open_loop, turn, result["requests"], Counter(result["errors"]), result["seconds"],
            after.clock_s - before.clock_s, after.stat_s - before.stat_s, result["p50_ms"], result["p99_ms"],
        )  # fmt: skip


def compare(plan: Plan) -> dict[str, Any]:
    """Start everything, measure, and return the results.

    Their keys are `rows`, `footprints`, `missing` (reasons by proxy) and `clocks_differ_ms`.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-cost-")))
        urls = stack.enter_context(backends(BACKENDS, plan.load_cores, folder))
        programs, missing, ways = {}, {}, {DIRECT: urls[0]}
        for proxy in plan.proxies:
            try:
                programs[proxy.name], ways[proxy.name] = stack.enter_context(
                    running(proxy, urls, plan.proxy_cores)
                )
            except SetupError as error:
                missing[proxy.name] = str(error)
                print(f"{proxy.name}: {error}", file=sys.stderr, flush=True)
        run = Run(plan, urls, stack.enter_context(Generator(plan.load_cores, folder)), ways, programs)
        first = run.warm_up()
        run.measure()
        last = {name: program.usage() for name, program in programs.items()}
    footprints = {
        proxy.name: Footprint(
            proxy.title, proxy.version(), proxy.settings, last[proxy.name].processes,
            last[proxy.name].threads, first[proxy.name].resident_mib, last[proxy.name].resident_mib,
            run.idle[proxy.name].per_second_ms,
        )
        for proxy in plan.proxies if proxy.name in programs
    }  # fmt: skip
    return {
        "rows": rows(run.slices), "footprints": footprints, "missing": missing,
        "clocks_differ_ms": clocks_differ_s(run.slices) * 1e3,
    }  # fmt: skip


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # run the clean-up that stops the programs
    try:
        proxies = [load(name) for name in args.proxies.split(",")]
        proxies += [of_command(text) for text in args.plug]
    except SetupError as error:
        sys.exit(f"cost.py: {error}")
    proxy_cores, load_cores = cores()
    plan = Plan(proxies, args.kinds.split(","), args.rounds, args.seconds, proxy_cores, load_cores)
    results = compare(plan)
    text = tables(results["rows"], results["footprints"], results["missing"])
    print(text)
    if args.page:
        shared = "any, shared with all others"
        args.page.write_text(PAGE.format(
            options=" --quick" if args.quick else "", file=args.page, machine=machine(),
            proxy_core=proxy_cores[0] if proxy_cores else shared,
            load_core=load_cores[0] if load_cores else shared,
            rounds=plan.rounds, seconds=plan.seconds, note=args.note, tables=text,
            differ=results["clocks_differ_ms"], busy=BUSY,
        ))  # fmt: skip
    print(json.dumps({
        "machine": machine(), "rounds": plan.rounds, "seconds": plan.seconds,
        "clocks_differ_ms": results["clocks_differ_ms"], "missing": results["missing"],
        "rows": [{**asdict(row), "per_core_s": row.per_core_s} for row in results["rows"]],
        "footprints": {name: asdict(footprint) for name, footprint in results["footprints"].items()},
        "targets": [asdict(target) for target in TARGETS],
    }))  # fmt: skip


def cores() -> tuple[list[int], list[int]]:
    """The last core for proxies and the first for the others; none if there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    return ([cores[-1]], [cores[0]]) if len(cores) > 1 else ([], [])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--proxies", default=",".join(NAMES), help="(default: %(default)s)")
    parser.add_argument(
        "--plug", action="append", default=[], metavar="NAME=COMMAND",
        help="one more proxy; in its command, {port} is replaced, and {backends} by --backend URL for each",
    )  # fmt: skip
    parser.add_argument("--kinds", default=",".join(KINDS), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="(default: 5; with --quick 2)")
    parser.add_argument("--seconds", type=float, help="of one measurement (default: 0.8; with --quick 0.3)")
    parser.add_argument("--quick", action="store_true", help="one minute; the figures are less certain")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a Markdown page")
    parser.add_argument(
        "--note", default="", help="a sentence for the page, such as what else ran on the machine"
    )
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.seconds = args.seconds or (0.3 if args.quick else 0.8)
    if unknown := set(args.kinds.split(",")) - set(KINDS):
        parser.error(f"--kinds has {', '.join(sorted(unknown))}; accepted are {', '.join(KINDS)}")
    return args


if __name__ == "__main__":
    main()
