"""Run a chaos day: `python -m tests.chaos.run [--minutes 20] [--seed 1] [--page FILE] [--quick]`.

The exit status is 1 if any invariant was violated. Everything that the programs wrote stays in --folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from fovea.gateway.usage.log import read_usage
from tests.chaos import surroundings
from tests.chaos.accounting import compare_parts, compare_receipts, compare_sums
from tests.chaos.batches import Batches
from tests.chaos.checker import Violation
from tests.chaos.faults import Inject, Log, catalogue
from tests.chaos.items import MAX_TOKENS, items
from tests.chaos.levels import Level, compare
from tests.chaos.load import Load
from tests.chaos.media_host import MediaHost
from tests.chaos.orders import Orders
from tests.chaos.recording import record
from tests.chaos.report import Report, write_page
from tests.chaos.stack import Stack
from tests.chaos.supervisor import StackError
from tests.chaos.timeline import Episode, timeline

FOLDER = Path("out/chaos")
QUICK_KINDS = ("client reset", "kill engine", "envoy abort")
QUICK_MINUTES, WARM_UP_S, SETTLE_S = 2.0, 40.0, 14.0
LAST_HOUR = 10_000_000
ITEMS = 40
"""Scenes that the pictures show."""
TRACE, ALLOWED_TRACE = "Traceback (most recent call last)", "cannot be written"
"""A stack trace in a log is a defect, except that of a batch whose end a full disk has refused."""
SECRET_MARKS = ("sesame", "data:image/png;base64,iVBOR")
"""Parts of requests that no log may hold: tokens of URLs, and pictures."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of load with faults (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="of all decisions (default: 1)")
    parser.add_argument("--page", type=Path, help="write a summary between the marks of this page")
    parser.add_argument("--quick", action="store_true", help="two minutes with three kinds of faults")
    parser.add_argument("--only", action="append", metavar="KIND", help="kind of fault; may be repeated")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"for logs (default: {FOLDER})")
    parser.add_argument("--list", action="store_true", help="list the kinds of faults and end")
    args = parser.parse_args()
    surroundings.enter(sys.argv[1:])
    return asyncio.run(Day(args).run())


@dataclass
class Parts:
    """The parts of a running day."""

    stack: Stack
    load: Load
    log: Log
    batches: Batches
    media: MediaHost
    faults: dict[str, Inject]


class Day:
    """One run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._seed: int = args.seed
        self._minutes: float = QUICK_MINUTES if args.quick else args.minutes
        self._folder: Path = args.folder.resolve()

    async def run(self) -> int:
        """Start the stack, disturb it, and return the exit status."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        own_network = surroundings.own_network()
        stack = Stack(self._folder, self._seed, private_hosts=not own_network)
        if self._args.list:
            print("\n".join(sorted(catalogue(stack, media=own_network))))
            return 0
        try:
            await stack.start()
            return await self._with(stack, own_network=own_network)
        finally:
            await stack.stop()

    async def _with(self, stack: Stack, *, own_network: bool) -> int:
        every = items(self._seed, ITEMS)
        known = await record(stack.engine_ports, every)
        usable = [item for item in every if item.name in known]
        _say(f"{len(usable)} of {len(every)} questions have known answers")
        media = MediaHost(Orders(self._seed, usable, "").hosted)
        host = surroundings.PUBLIC if own_network else "127.0.0.1"
        port = await media.start(host, 80 if own_network else 0, 443 if own_network else 0)
        orders = Orders(self._seed, usable, f"http://{host}" if own_network else "")
        faults = catalogue(stack, media=own_network)
        missing = [] if own_network else [f"media (port {port} is private)"]
        missing += [kind for kind in ("full disk", "read-only cache", "clock jump", "out of memory")
                    if kind not in faults]  # fmt: skip
        schedule = timeline(self._seed, WARM_UP_S, WARM_UP_S + 60 * self._minutes, self._kinds(faults))
        load = Load(stack, orders, known, schedule)
        parts = Parts(stack, load, Log(), self._batches(stack, load, usable), media, faults)
        before = await self._warm_up(parts)
        await self._disturb(parts)
        await asyncio.sleep(SETTLE_S)
        after = await stack.levels()
        await asyncio.sleep(2.0)
        found = [*load.violations, *parts.batches.violations, *compare(before, after), *self._records(parts)]
        await media.stop()
        report = Report(
            self._seed, self._minutes, load, parts.log, parts.batches.counts, before, after,
            found, missing, (len(usable), len(every)),
        )  # fmt: skip
        text = report.text()
        print(text)
        (self._folder / "report.md").write_text(text + "\n")
        (self._folder / "violations.json").write_text(
            json.dumps([[each.rule, each.marker, each.detail] for each in found], indent=1)
        )
        if self._args.page:
            write_page(self._args.page, report.summary())
        return 1 if found else 0

    def _kinds(self, faults: dict[str, Inject]) -> list[str]:
        wanted = self._args.only or (QUICK_KINDS if self._args.quick else sorted(faults))
        unknown = sorted(set(wanted) - set(faults))
        if unknown:
            raise SystemExit(f"unknown kinds {unknown}; --list names all")
        return list(wanted)

    def _batches(self, stack: Stack, load: Load, usable: list[Any]) -> Batches:
        def full() -> bool:
            now = load.now_s
            return any(each.kind == "full disk" and each.may_disturb(now - 30, now) for each in load.happened)

        return Batches(stack.engine_ports[0], usable, load.known, self._seed, full)

    async def _warm_up(self, parts: Parts) -> dict[str, Level]:
        """Run the load without faults, let it settle, and return the level of memory and descriptors."""
        load, stopping = parts.load, asyncio.Event()
        load.started_s = time.monotonic()
        load.now_active.update({"media", "flood"} & set(parts.faults))
        warm = asyncio.gather(load.run(stopping), parts.batches.run(stopping))
        await asyncio.sleep(WARM_UP_S - SETTLE_S)
        stopping.set()
        await warm
        load.now_active.clear()
        await asyncio.sleep(SETTLE_S)
        return await parts.stack.levels()

    async def _disturb(self, parts: Parts) -> None:
        load, stopping = parts.load, asyncio.Event()
        first = load.schedule[0].begin_s if load.schedule else 0.0
        load.started_s = time.monotonic() - first + 1.0
        running = asyncio.gather(load.run(stopping), parts.batches.run(stopping), return_exceptions=True)
        try:
            for episode in load.schedule:
                await self._episode(parts, episode)
            await self._sleep_until(parts, WARM_UP_S + 60 * self._minutes)
        finally:
            stopping.set()
            for error in await running:
                if error is not None:  # such as an answer of a form that the client does not know
                    load.violations.append(Violation("client", "client", repr(error)))

    async def _episode(self, parts: Parts, episode: Episode) -> None:
        await self._sleep_until(parts, episode.begin_s)
        load = parts.load
        _say(f"{load.now_s:7.1f} s  {episode.kind}")
        rng = Random(f"{self._seed}/episode/{episode.number}")
        load.happened.append(replace(episode, begin_s=load.now_s, end_s=math.inf))
        load.now_active.add(episode.kind)
        try:
            async with parts.faults[episode.kind](parts.stack, episode, rng, parts.log):
                await self._sleep_until(parts, episode.end_s)
                load.now_active.discard(episode.kind)
        except (StackError, TimeoutError) as error:
            load.violations.append(Violation("recovery", episode.kind, str(error)))
            load.now_active.discard(episode.kind)
        load.happened[-1] = replace(load.happened[-1], end_s=load.now_s)

    async def _sleep_until(self, parts: Parts, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - parts.load.now_s))

    def _records(self, parts: Parts) -> list[Violation]:
        """Check the gateway's records, the logs, and the private address."""
        load, stack = parts.load, parts.stack
        audit = [json.loads(line) for line in stack.audit_log.read_text().splitlines()]
        found = compare_receipts(load.receipts, audit, stack.worker_kills)
        found += compare_parts(load.parts, audit, MAX_TOKENS)
        rows = read_usage(stack.usage_file, ("tenant",), 0, LAST_HOUR).rows
        found += compare_sums(audit, [row._asdict() for row in rows], stack.worker_kills, load.ends)
        for log in stack.logs():
            text = log.read_text(errors="replace")
            for mark in (*SECRET_MARKS, *stack.keys.values()):
                if mark in text:
                    found.append(Violation("secret", log.name, f"the log holds {mark[:12]}..."))
            place = text.find(TRACE)
            if place >= 0 and ALLOWED_TRACE not in text[max(0, place - 200) : place]:
                found.append(Violation("traceback", log.name, text[max(0, place - 200) : place + 1500]))
        if parts.media.canary:
            found.append(Violation("private address", "media", f"{parts.media.canary} requests reached it"))
        return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
