"""One run against one server: connect, run the workloads, compare the results with the targets."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from fovea.bench.client import Client, Dialect
from fovea.bench.measure import without_nan
from fovea.bench.report import VERSION, machine
from fovea.bench.run import ProgressObserver, WorkloadResult, plan, play
from fovea.bench.settings import LOADS, Price, Shape, Target, Traffic
from fovea.bench.sla import Sla, judge
from fovea.core.errors import ConfigError
from fovea.core.trace import Trace

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in an event loop of its own, and return the result.

    The loop is uvloop's, which takes less processor time per event of a stream than asyncio's own.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process and its descendants, in MiB.

    peak_mib: the sum of each process's highest resident size since its start. With several processes this is
        an upper bound: their peaks may fall at different times, and shared memory counts once per process.
    resident_mib: the sum of the resident sizes now.
    processes: number of processes.
    """

    peak_mib: float
    resident_mib: float
    processes: int


def memory_of(pid: int, proc: Path = PROC) -> Memory:
    """Memory of process `pid` and all its descendants. Raises ConfigError if there is no such process."""
    statuses = _statuses(proc)
    if pid not in statuses:
        raise ConfigError(f"--pid is {pid}, and {proc} shows no such process", param="pid")
    family, growing = {pid}, True
    while growing:
        children = {number for number, status in statuses.items() if status.get("PPid", 0) in family} - family
        family |= children
        growing = bool(children)
    peak, now = (sum(statuses[number].get(name, 0) for number in family) for name in ("VmHWM", "VmRSS"))
    return Memory(peak / 1024, now / 1024, len(family))


def _statuses(proc: Path) -> dict[int, dict[str, int]]:
    """The numeric fields of every process's status file, by process id. Memory sizes are in KiB."""
    statuses = {}
    for path in proc.glob("[0-9]*/status"):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue  # the process has ended in the meantime
        pairs = (line.split() for line in lines)
        statuses[int(path.parent.name)] = {
            pair[0].rstrip(":"): int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdecimal()
        }
    return statuses


@dataclass(frozen=True, slots=True)
class Session:
    """Everything that defines a run.

    target: the server.
    names: the workloads, in order.
    shape, traffic: settings of the fixed workloads and of the traffic workloads.
    nonce: runs with different nonces share no contents.
    sla: the service-level targets.
    price: costs of the server's machine.
    trace: the requests of the workload "trace".
    pid: process id of the server, if its memory is to be measured.
    """

    target: Target
    names: tuple[str, ...]
    shape: Shape
    traffic: Traffic
    nonce: str
    sla: Sla
    price: Price = Price()
    trace: Trace | None = None
    pid: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that two runs must have in common to be comparable, as JSON values."""
        loads = asdict(self.traffic) if any(name in LOADS for name in self.names) else {}
        settings = {"nonce": self.nonce, "images_as": self.target.images_as, **asdict(self.shape), **loads}
        return dict(without_nan(settings))  # in the form in which a results file holds them


@dataclass(frozen=True, slots=True)
class SessionResult:
    """The results of a run.

    session: what was run.
    model, dialect: the model's name, and the fields that the server accepted.
    results: one per workload, in order.
    memory: of the server's processes at the end; None if no process id was given.
    """

    session: Session
    model: str
    dialect: Dialect
    results: list[WorkloadResult]
    memory: Memory | None

    def as_dict(self) -> dict[str, Any]:
        """The results as JSON values, without the single requests and without the API key."""
        sla = self.session.sla
        return {
            "fovea_bench": VERSION,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "url": self.session.target.url,
            "model": self.model,
            "settings": self.session.settings,
            "dialect": asdict(self.dialect),
            "client": machine(),
            "sla": {"source": sla.source, "good": asdict(sla.good), "targets": dict(sla.targets)},
            "memory": asdict(self.memory) if self.memory else None,
            "results": [result.as_dict() for result in self.results],
        }


async def measure(session: Session, observer: ProgressObserver) -> SessionResult:
    """Run a session.

    Raises Unavailable or ConfigError if the server cannot be used at all. Failures of single requests are
    counted, not raised.
    """
    workloads = plan(session.names, session.shape, session.traffic, session.trace)
    if session.pid is not None:
        memory_of(session.pid)
    async with Client(session.target) as client:
        await client.connect()
        results = await play(client, workloads, session.shape, session.nonce, session.sla.good, observer)
    memory = None if session.pid is None else memory_of(session.pid)
    results = [_with_verdicts(result, session) for result in results]
    return SessionResult(session, client.model, client.dialect, results, memory)


def _with_verdicts(result: WorkloadResult, session: Session) -> WorkloadResult:
    """Add verdicts to the results of traffic. Targets of a service do not apply to fixed workloads."""
    if not result.is_traffic:
        return result
    return replace(
        result, verdicts=judge(session.sla, result.summary, session.price.price_per_hour, result.offered_rate)
    )
