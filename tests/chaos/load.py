"""The clients of a chaos day, and the judgement of every answer they get."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.accounting import Receipt
from tests.chaos.checker import Context, Judgement, Violation, judge
from tests.chaos.client import Outcome, send
from tests.chaos.orders import Order, Orders
from tests.chaos.stack import CLIENT_S, FLOOD, QUIET, TENANTS, Stack
from tests.chaos.timeline import Episode

PAUSE_S, QUIET_PAUSE_S = 0.15, 1.0
FLOOD_AT_ONCE = 24
NOTHING = "no fault"


@dataclass
class Tally:
    """Requests of one kind of episode by verdict."""

    verdicts: Counter[str] = field(default_factory=Counter)
    requests: int = 0


@dataclass
class Load:
    """Sends orders until it is stopped, and judges each answer at once.

    known: undisturbed answers by the items' names.
    schedule: the episodes as planned. happened: as they happened; the end of the current one is infinite.
        Their times are seconds after `started_s` of the client's clock.
    now_active: kinds of the current episodes.
    running: known answers of the requests in flight, by marker.
    receipts: answers that arrived. parts: tokens of chat streams that arrived in part, by marker.
    """

    stack: Stack
    orders: Orders
    known: Mapping[str, str]
    schedule: Sequence[Episode]
    started_s: float = 0.0
    happened: list[Episode] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)
    media: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    parts: dict[str, int] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    running: dict[str, str] = field(default_factory=dict)
    now_active: set[str] = field(default_factory=set)
    _numbers: Counter[str] = field(default_factory=Counter)

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started_s

    async def run(self, stopping: asyncio.Event) -> None:
        """Run all clients until the event is set, and wait for their last answers."""
        clients = [self._client(name, stopping, PAUSE_S) for name in TENANTS]
        quiet = self._client(QUIET, stopping, QUIET_PAUSE_S)
        await asyncio.gather(*clients, quiet, self._flooding(stopping))

    async def _client(self, name: str, stopping: asyncio.Event, pause_s: float) -> None:
        while not stopping.is_set():
            await self.ask(self._next(name))
            await asyncio.sleep(pause_s)

    def _next(self, client: str) -> Order:
        self._numbers[client] += 1
        return self.orders.order(client, self._numbers[client], media="media" in self.now_active)

    async def _flooding(self, stopping: asyncio.Event) -> None:
        """Send many requests at once while an episode asks for it."""
        while not stopping.is_set():
            if FLOOD not in self.now_active:
                await asyncio.sleep(PAUSE_S)
                continue
            await asyncio.gather(*(self.ask(self._next(FLOOD)) for _ in range(FLOOD_AT_ONCE)))

    async def ask(self, order: Order) -> None:
        """Send one order and judge its answer."""
        known = None if order.media else self.known[order.item.name]
        others = frozenset(self.running.values())
        self.running[order.marker] = known or ""
        headers = {
            "content-type": "application/json", "authorization": f"Bearer {self.stack.keys[order.client]}",
            "x-request-id": order.marker,
        }  # fmt: skip
        if order.cache:
            headers["cache-control"] = order.cache
        outcome = await send(
            self.stack.port, "POST", order.path, headers, order.body(), CLIENT_S, order.cancel_after_s
        )
        others |= frozenset(self.running.values())
        del self.running[order.marker]
        self._judge(order, outcome, known, others - {known or ""})

    def _judge(self, order: Order, outcome: Outcome, known: str | None, others: Iterable[str]) -> None:
        begin, end = outcome.begin_s - self.started_s, outcome.end_s - self.started_s
        disturbing = [episode for episode in self.happened if episode.may_disturb(begin, end)]
        connection = self.stack.front_proxy.connections.get(outcome.peer)
        context = Context(
            known,
            frozenset(others) - {""},
            tuple(self.stack.keys.values()),
            frozenset() if connection is None else frozenset(connection.injected),
            frozenset(episode.kind for episode in disturbing),
            order.client == FLOOD,
        )
        judgement = judge(order, outcome, context)
        form = f"{order.kind}/{order.api}{'/stream' if order.stream else ''}"
        when = f"{form} at {begin:.1f}-{end:.1f} s during {', '.join(sorted(context.active)) or 'no fault'}"
        judgement.violations = [
            each._replace(detail=f"[{when}] {each.detail}") for each in judgement.violations
        ]
        self.ends[order.marker] = time.time()
        self._count(
            order, judgement, [each.kind for each in disturbing if each.begin_s < end and begin < each.end_s]
        )
        self._keep_receipt(order, judgement)

    def _count(self, order: Order, judgement: Judgement, kinds: Sequence[str]) -> None:
        self.violations += judgement.violations
        self.kinds[order.kind] += 1
        if order.media:
            self.media[f"{order.media} {judgement.verdict}"] += 1
        for kind in kinds or [NOTHING]:
            tally = self.tallies.setdefault(kind, Tally())
            tally.requests += 1
            tally.verdicts[judgement.verdict] += 1

    def _keep_receipt(self, order: Order, judgement: Judgement) -> None:
        answer = judgement.answer
        if answer is not None and answer.done and judgement.verdict in ("ok", "degraded"):
            self.receipts.append(Receipt(order.marker, time.time(), answer.usage))
        elif answer is not None and answer.pieces and judgement.verdict in ("cut", "cancelled", "refused"):
            self.parts[order.marker] = answer.pieces
