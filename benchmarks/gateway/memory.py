"""Measure whether a proxy's memory stays flat under many requests and many slow clients.

    python benchmarks/gateway/memory.py --proxy gateway [--requests 100000] [--clients 1000] [--quick]

Three phases: requests in a closed loop; clients that read an answer at one byte per second; clients that
send a body at 100 bytes per second. They run three times, each time with a third of the requests. A phase is
flat if the resident memory, by a straight line through the samples of its second half, grows there by no more
than 5% or 8 MiB. The first time fills the allocator's pools. The maximum of the last time has to be that of
the second time, within the same limits. The exit status is 1 if something is not flat. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cost import cores
from load import Order
from payloads import KINDS
from proxies import NAMES, SetupError, load, of_command
from running import Generator, Program, backends, running
from slow import Clients, readers, senders

TIMES = 3
BATCH = 1000
"""Requests between two samples."""
GROWTH_SHARE, GROWTH_MIB = 0.05, 8.0


@dataclass(frozen=True)
class Phase:
    """The resident memory of a proxy in one phase, in MiB.

    steps: what the samples are a function of: thousands of requests, or seconds.
    closed: connections that the proxy closed, because their client was too slow.
    errors: failed requests by reason.
    """

    name: str
    turn: int
    unit: str
    steps: Sequence[float]
    mib: Sequence[float]
    closed: int
    errors: dict[str, int]

    @property
    def slope(self) -> float:
        """MiB per step in the second half, by least squares."""
        half = len(self.mib) // 2
        return slope(self.steps[half:], self.mib[half:])

    @property
    def growth_mib(self) -> float:
        """Growth over the second half by that slope."""
        return self.slope * (self.steps[-1] - self.steps[len(self.steps) // 2])

    @property
    def is_flat(self) -> bool:
        return self.growth_mib <= tolerance(max(self.mib))


def tolerance(mib: float) -> float:
    """Growth that counts as none, in MiB."""
    return max(GROWTH_MIB, GROWTH_SHARE * mib)


def slope(steps: Sequence[float], values: Sequence[float]) -> float:
    """The slope of a line through points by least squares; 0 for fewer than two points."""
    if len(steps) < 2:
        return 0.0
    middle, mean = sum(steps) / len(steps), sum(values) / len(values)
    products = sum((x - middle) * (y - mean) for x, y in zip(steps, values, strict=True))
    return products / sum((x - middle) ** 2 for x in steps)


def problems(phases: Sequence[Phase]) -> list[str]:
    """Say in words which phases are not flat."""
    found = [f"{p.name}, time {p.turn + 1}: grows by {p.growth_mib:.1f} MiB" for p in phases if not p.is_flat]
    for second in (phase for phase in phases if phase.turn == 1):
        last = [phase for phase in phases if phase.name == second.name][-1]
        before, after = max(second.mib), max(last.mib)
        if after - before > tolerance(before):
            found.append(
                f"{second.name}: the maximum is {before:.1f} MiB the second time, "
                f"and {after:.1f} MiB the last time"
            )
    return found


def under_requests(
    program: Program, url: str, generator: Generator, kinds: Sequence[str], total: int, turn: int
) -> Phase:
    """Send requests of the kinds in turn, in batches, and sample after each."""
    steps, mib = [0.0], [program.usage().resident_mib]
    errors: dict[str, int] = {}
    for number in range(max(1, total // BATCH)):
        kind = kinds[number % len(kinds)]
        result = generator.carry_out(Order(url, kind, requests=min(BATCH, total)))
        for reason, count in result["errors"].items():
            errors[reason] = errors.get(reason, 0) + count
        steps.append((number + 1) * BATCH / 1000)
        mib.append(program.usage().resident_mib)
    return Phase("requests", turn, "1,000 requests", steps, mib, 0, errors)


def under_clients(
    name: str, program: Program, clients: AbstractContextManager[Clients], seconds: float, turn: int
) -> Phase:
    """Let slow clients take a turn each second, and sample."""
    steps, mib = [], []
    with clients as crowd:
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            crowd.turn()
            steps.append(now)
            mib.append(program.usage().resident_mib)
            time.sleep(max(0.0, began + now + 1.0 - time.monotonic()))
        return Phase(name, turn, "s", steps, mib, crowd.closed, {})


def measure(args: argparse.Namespace) -> list[Phase]:
    """Raises SetupError if the proxy cannot be started."""
    proxy_cores, load_cores = cores()
    slow: dict[str, Callable[[str, int], AbstractContextManager[Clients]]] = {
        "slow readers": readers,
        "slow senders": senders,
    }
    phases = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-memory-")))
        urls = stack.enter_context(backends(2, load_cores, folder))
        proxy = of_command(args.plug) if args.plug else load(args.proxy)
        program, url = stack.enter_context(running(proxy, urls, proxy_cores))
        generator = stack.enter_context(Generator(load_cores, folder))
        for turn in range(TIMES):
            phases.append(
                under_requests(program, url, generator, args.kinds.split(","), args.requests // TIMES, turn)
            )
            print(_line(phases[-1]), flush=True)
            for name, clients in slow.items():
                phases.append(under_clients(name, program, clients(url, args.clients), args.seconds, turn))
                print(_line(phases[-1]), flush=True)
    return phases


def _line(phase: Phase) -> str:
    return (
        f"{phase.name:13} {phase.turn + 1}: starts with {phase.mib[0]:6.1f} MiB, "
        f"most {max(phase.mib):6.1f} MiB, ends with {phase.mib[-1]:6.1f} MiB, "
        f"slope {phase.slope:+.3f} MiB per {phase.unit}"
        f"{f', {phase.closed} connections closed by the proxy' if phase.closed else ''}"
        f"{f', errors: {phase.errors}' if phase.errors else ''}"
    )


def main() -> int:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # run the clean-up that stops the programs
    try:
        phases = measure(args)
    except SetupError as error:
        sys.exit(f"memory.py: {error}")
    found = problems(phases)
    print("\n".join(found) or "flat")
    results: list[dict[str, Any]] = [{**asdict(p), "slope": p.slope, "flat": p.is_flat} for p in phases]
    print(json.dumps({"proxy": args.plug or args.proxy, "problems": found, "phases": results}))
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--proxy", default="gateway", choices=NAMES, help="(default: %(default)s)")
    parser.add_argument("--plug", default="", metavar="NAME=COMMAND", help="another proxy, as for cost.py")
    parser.add_argument("--requests", type=int, default=100_000, help="in all (default: %(default)s)")
    parser.add_argument("--kinds", default="text,image,burst", help="in turn (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=1000, help="slow clients (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a phase with slow clients")
    parser.add_argument("--quick", action="store_true", help="6,000 requests, 200 clients, 5 s")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.clients, args.seconds = 6000, 200, 5.0
    if unknown := set(args.kinds.split(",")) - set(KINDS):
        parser.error(f"--kinds has {', '.join(sorted(unknown))}; accepted are {', '.join(KINDS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
