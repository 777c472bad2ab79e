"""One run against one server: connect, play what was asked for, judge it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from fovea.bench.client import Client
from fovea.bench.dialect import Dialect
from fovea.bench.measure import plain
from fovea.bench.memory import Memory, memory_of
from fovea.bench.report import VERSION, machine
from fovea.bench.run import Result, Watch, plan, play
from fovea.bench.settings import LOADS, Price, Shape, Target, Traffic
from fovea.bench.sla import Sla, judge
from fovea.core.trace import Trace


@dataclass(frozen=True, slots=True)
class Session:
    """names: workloads, in their order. trace: of the workload of that name.
    nonce: sets the contents apart from those of other runs. pid: process of the server whose memory is told.
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
        """What another run must have the same to be compared with this one."""
        loads = asdict(self.traffic) if any(name in LOADS for name in self.names) else {}
        found = {"nonce": self.nonce, "images_as": self.target.images_as, **asdict(self.shape), **loads}
        return dict(plain(found))  # as a file of earlier results has them


@dataclass(frozen=True, slots=True)
class Findings:
    session: Session
    model: str
    dialect: Dialect
    results: list[Result]
    memory: Memory | None

    def as_dict(self) -> dict[str, Any]:
        """Everything but the single requests and the API key."""
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


async def measure(session: Session, watch: Watch) -> Findings:
    """Raises Unavailable or ConfigError when the server can not be asked at all; what single requests meet is counted."""
    parts = plan(session.names, session.shape, session.traffic, session.trace)
    if session.pid is not None:
        memory_of(session.pid)
    async with Client(session.target) as client:
        await client.connect()
        results = await play(client, parts, session.shape, session.nonce, session.sla.good, watch)
    memory = None if session.pid is None else memory_of(session.pid)
    return Findings(session, client.model, client.dialect, [_judged(r, session) for r in results], memory)


def _judged(result: Result, session: Session) -> Result:
    """Targets are a service's: fixed workloads, which ask one thing at a time, are not held against them."""
    if not result.load:
        return result
    return replace(
        result, verdicts=judge(session.sla, result.summary, session.price.price_per_hour, result.offered)
    )
