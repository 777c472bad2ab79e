"""Memory, SQLite and Redis admit as a simple model does, whatever the order of requests, ends and waits."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Coroutine
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fovea.core.errors import InvalidRequest, Overloaded
from fovea.gateway.tenants.accounts import Accounts, Reservation, open_accounts
from fovea.gateway.tenants.keys import TenantLimits
from fovea.gateway.usage.prices import Amounts
from tests.gateway.tenants.support import Clock, settings
from tests.support.servers import RedisServer
from tests.support.thorough import examples

TICK = Fraction(1, 64)
LEASE_S = 300
NUMBERS = itertools.count()
SHORTEST = Fraction(1, 10**6)


class Model:
    """One tenant: levels of buckets in exact fractions, and sums per day and month, named by their dates."""

    def __init__(self, limits: TenantLimits, now: Fraction) -> None:
        self.minute, self.day = limits.bounds.minute, limits.bounds.day
        self.month, self.places = limits.bounds.month_cost, limits.bounds.in_flight
        self.levels = [Fraction(limit) for limit in self.minute]
        self.days: dict[Any, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self.months: dict[Any, int] = defaultdict(int)
        self.open: dict[int, tuple[Fraction, Any, Any, Amounts]] = {}
        self.now = now

    def advance(self, now: Fraction) -> None:
        for i, limit in enumerate(self.minute):
            self.levels[i] = min(Fraction(limit), self.levels[i] + (now - self.now) * Fraction(limit) / 60)
        self.now = now
        self.open = {key: value for key, value in self.open.items() if value[0] > now}

    def reserve(self, number: int, amounts: Amounts) -> bool:
        date = datetime.fromtimestamp(float(self.now), UTC)
        day, month = date.date(), (date.year, date.month)
        room = all(
            not amount
            or (
                (not self.minute[i] or amount <= self.levels[i] + SHORTEST)
                and (not self.day[i] or self.days[day][i] + amount <= self.day[i])
            )
            for i, amount in enumerate(amounts)
        )
        if self.month and amounts.cost and self.months[month] + amounts.cost > self.month:
            room = False
        if self.places and len(self.open) >= self.places:
            room = False
        if room:
            self.add(amounts, day, month)
            self.open[number] = (self.now + LEASE_S, day, month, amounts)
        return room

    def settle(self, number: int, used: Amounts) -> None:
        if number in self.open:
            _, day, month, reserved = self.open.pop(number)
            more = Amounts(*(a - b for a, b in zip(used, reserved, strict=True)))
            self.add(more, day, month)

    def add(self, amounts: Amounts, day: Any, month: Any) -> None:
        for i, amount in enumerate(amounts):
            self.levels[i] = min(Fraction(self.minute[i]), self.levels[i] - amount)
            self.days[day][i] += amount
        self.months[month] += amounts.cost


amounts = st.builds(
    Amounts, st.integers(0, 2), st.integers(0, 400), st.integers(0, 400), st.integers(0, 4_000_000)
)
small = st.sampled_from((0, 0, 700))
costs = st.sampled_from((0.0, 0.0, 9.0))
limits = st.builds(
    TenantLimits,
    requests_per_minute=st.sampled_from((0, 3)),
    text_tokens_per_minute=small,
    visual_tokens_per_minute=small,
    cost_per_minute=costs,
    requests_per_day=st.sampled_from((0, 9)),
    text_tokens_per_day=st.sampled_from((0, 0, 900)),
    visual_tokens_per_day=st.sampled_from((0, 0, 900)),
    cost_per_day=costs,
    cost_per_month=st.sampled_from((0.0, 12.0)),
    max_in_flight=st.sampled_from((0, 0, 2)),
).filter(lambda made: made.counted)


class Agree(RuleBasedStateMachine):
    """Does the same to all accounts and to the model."""

    folder: Path
    url: str

    @initialize(limits=limits, day=st.integers(0, 40_000))
    def begin(self, limits: TenantLimits, day: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.number = next(NUMBERS)
        self.clock = Clock(day * 86_400.0 + 86_400 - 20)
        self.limits, self.model = limits, Model(limits, Fraction(self.clock.now))
        stores = ("memory", f"sqlite:{self.folder / 'accounts.db'}", self.url)
        self.accounts: list[Accounts] = [
            open_accounts(settings(each, lease_s=float(LEASE_S)), self.clock) for each in stores
        ]
        self.reserved: dict[int, list[Reservation]] = {}

    @rule(amounts=amounts)
    def reserve(self, amounts: Amounts) -> None:
        answers = [self.run(self.ask(each, amounts)) for each in self.accounts]
        if any(answer == "never" for answer in answers):
            assert answers == ["never"] * 3
            return
        number = next(NUMBERS)
        expected = self.model.reserve(number, amounts)
        if expected:
            assert all(isinstance(answer, Reservation) for answer in answers)
            self.reserved[number] = answers
        else:
            assert len({(answer.message.partition("; try again")[0], answer.code) for answer in answers}) == 1
            waits = [answer.retry_after for answer in answers]
            assert waits[0] > 0
            assert waits == pytest.approx([waits[0]] * 3, abs=1e-6)

    @precondition(lambda self: self.reserved)
    @rule(used=amounts, data=st.data(), again=st.booleans())
    def settle(self, used: Amounts, data: st.DataObject, again: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.reserved)))
        self.model.settle(number, used)
        for accounts, reservation in zip(self.accounts, self.reserved.pop(number), strict=True):
            self.run(accounts.settle(reservation, used))
            if again:
                self.run(accounts.settle(reservation, used))
        self.compare_usage()

    @rule(
        ticks=st.one_of(
            st.integers(1, 64 * 30), st.sampled_from((64 * LEASE_S, 64 * 86_400, 64 * 86_400 * 9))
        )
    )
    def wait(self, ticks: int) -> None:
        self.clock.now += float(ticks * TICK)
        self.model.advance(Fraction(self.clock.now))

    @rule()
    def compare_usage(self) -> None:
        name = f"t{self.number}"
        memory, sqlite, redis = [self.run(each.usage(name, self.limits)) for each in self.accounts]
        if memory.birth:
            for other in (sqlite, redis):
                # Memory drains at refusals, too. Smaller steps round differently.
                assert other.minute == pytest.approx(memory.minute, abs=1e-6)
                assert other._replace(birth="", minute=()) == memory._replace(birth="", minute=())
            assert memory.in_flight == len(self.model.open)
            for i, limit in enumerate(self.limits.bounds.minute):
                if limit:
                    assert limit - memory.minute[i] == pytest.approx(float(self.model.levels[i]), abs=1e-5)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for each in self.accounts:
                self.run(each.aclose())
            self.loop.close()

    async def ask(self, accounts: Accounts, amounts: Amounts) -> Any:
        try:
            return await accounts.reserve(f"t{self.number}", self.limits, amounts)
        except Overloaded as error:
            return error
        except InvalidRequest:
            return "never"

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)


def test_all_stores_agree_with_the_model(tmp_path: Path, redis_server: RedisServer) -> None:
    Agree.folder, Agree.url = tmp_path, redis_server.url
    run_state_machine_as_test(
        Agree, settings=profile(max_examples=examples(80), stateful_step_count=30, deadline=None)
    )


@pytest.mark.parametrize("place", ["memory", "sqlite", "redis"])
async def test_limits_per_minute_go_on_after_the_clock_was_set_forward_and_back(
    place: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    """Buckets once stayed empty until the clock had come to its wrong time again, two hours later."""
    where = {"memory": "memory", "sqlite": f"sqlite:{tmp_path}/accounts", "redis": redis_server.url}[place]
    clock, limits = Clock(), TenantLimits(requests_per_minute=60, requests_per_day=100)
    accounts, request = open_accounts(settings(where), clock), Amounts(1, 0, 0, 0)
    right = clock.now
    for now in (right, right + 7200, right + 1):
        clock.now = now
        await accounts.reserve("clock", limits, request)
    for _ in range(57):
        await accounts.reserve("clock", limits, request)
    clock.now += 30
    for _ in range(30):
        await accounts.reserve("clock", limits, request)
    clock.now += 60
    for _ in range(10):
        await accounts.reserve("clock", limits, request)
    with pytest.raises(Overloaded, match="requests_per_day"):
        await accounts.reserve("clock", limits, request)
    await accounts.aclose()
