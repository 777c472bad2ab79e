"""Accounts over a store that a test makes fail: lost answers, cancelled requests, locked files."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from fovea.core.errors import Overloaded, Unavailable
from fovea.gateway.tenants.account import Account, Adjustment, Bounds, Counters, difference, new_account
from fovea.gateway.tenants.accounts import open_accounts
from fovea.gateway.tenants.keys import TenantLimits
from fovea.gateway.tenants.shared import THRESHOLD, Pending, SharedAccounts, StoreFailed
from fovea.gateway.usage.prices import Amounts
from tests.gateway.tenants.support import Clock, admitted, settings, text

DAILY = TenantLimits(text_tokens_per_day=1000)


class Flaky:
    """A store of one tenant in memory.

    lose: calls are carried out, and then fail.
    words: what such a failure says.
    hang: calls are carried out, and then never end.
    """

    def __init__(self, clock: Clock) -> None:
        self.account: Account = new_account("first", int(clock() * 1e6))
        self.leases: set[str] = set()
        self.lose = self.hang = False
        self.words = "the answer was lost"

    async def reserve(
        self, lease: str, tenant: str, bounds: Bounds, amounts: Amounts, known: Counters
    ) -> tuple[bool, Counters]:
        fits = self.account.fits(bounds, amounts)
        if fits:
            self.account.take(bounds, amounts)
            self.leases.add(lease)
        return fits, await self.answer()

    async def adjust(self, tenant: str, bounds: Bounds, change: Adjustment, known: Counters) -> Counters:
        if change.lease in self.leases or not change.lease:
            self.account.in_flight -= bool(change.lease)
            self.leases.discard(change.lease)
            self.account.adjust(bounds, change)
        return await self.answer()

    async def adopt(self, tenant: str, bounds: Bounds, leases: Sequence[str], known: Counters) -> Counters:
        self.account.in_flight += len(set(leases) - self.leases)
        self.leases |= set(leases)
        return await self.answer()

    async def aclose(self) -> None:
        self.hang = self.lose = False

    async def answer(self) -> Counters:
        if self.hang:
            await asyncio.Event().wait()
        if self.lose:
            raise StoreFailed(self.words)
        return self.account.counters()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea.gateway.tenants.shared.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("fovea.gateway.tenants.shared.LONGEST_PAUSE_S", 0.002)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Flaky:
    return Flaky(clock)


@pytest.fixture
def accounts(store: Flaky, clock: Clock) -> SharedAccounts:
    return SharedAccounts(store, settings("redis://x", on_failure="local"), clock)


async def settled(accounts: SharedAccounts) -> None:
    """Wait until nothing waits any more."""
    while accounts.stats()["pending"] or accounts.stats()["failing"]:
        await asyncio.sleep(0.001)


async def test_a_lost_answer_is_given_back_and_counted_once(accounts: SharedAccounts, store: Flaky) -> None:
    """The store took the amounts, and the gateway admitted the request alone: it must not count twice."""
    store.lose = True
    reservation = await accounts.reserve("alice", DAILY, text(100))
    assert store.account.day_used[1] == 100
    assert reservation.local
    store.lose = False
    await settled(accounts)
    assert (store.account.day_used[1], store.account.in_flight) == (100, 0)
    await accounts.settle(reservation, text(30))
    await settled(accounts)
    assert store.account.day_used == [1, 30, 0, 0]
    await accounts.aclose()


async def test_a_request_that_is_cancelled_takes_nothing(accounts: SharedAccounts, store: Flaky) -> None:
    store.hang = True
    task = asyncio.create_task(accounts.reserve("alice", DAILY, text(100)))
    await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    store.hang = False
    await settled(accounts)
    assert store.account.day_used == [0, 0, 0, 0]
    assert store.leases == set()
    await accounts.aclose()


async def test_a_settlement_that_is_cancelled_still_counts(accounts: SharedAccounts, store: Flaky) -> None:
    reservation = await accounts.reserve("alice", DAILY, text(100))
    store.hang = True
    task = asyncio.create_task(accounts.settle(reservation, text(40)))
    await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    store.hang = False
    await settled(accounts)
    assert store.account.day_used[1] == 40
    await accounts.aclose()


async def test_requests_alone_hold_places_in_the_store_afterwards(
    accounts: SharedAccounts, store: Flaky
) -> None:
    """A request that was admitted during an outage counts as in flight when the outage is over."""
    limits = TenantLimits(max_in_flight=2)
    store.lose = True
    held = await admitted(accounts, "alice", limits, *[text(1)] * 5)
    assert len(held) == 2
    store.lose = False
    await settled(accounts)
    assert store.account.in_flight == 2
    with pytest.raises(Overloaded, match="2 requests in flight"):
        await accounts.reserve("alice", limits, text(1))
    for reservation in held:
        await accounts.settle(reservation, text(1))
    await settled(accounts)
    assert store.leases == set()
    assert len(await admitted(accounts, "alice", limits, *[text(1)] * 5)) == 2
    await accounts.aclose()


async def test_limits_per_minute_drain_during_an_outage(
    accounts: SharedAccounts, store: Flaky, clock: Clock
) -> None:
    """An outage of an hour must not leave an hour's debt."""
    limits = TenantLimits(text_tokens_per_minute=600)
    store.lose = True
    for _ in range(60):
        reservation = await accounts.reserve("alice", limits, text(600))
        await accounts.settle(reservation, text(600))
        clock.now += 60
    clock.now -= 30
    store.account.advance(limits.bounds, int(clock() * 1e6))
    store.lose = False
    await settled(accounts)
    assert store.account.minute[1] == pytest.approx(300)
    await accounts.aclose()


async def test_a_single_failure_leaves_no_account_behind(accounts: SharedAccounts, store: Flaky) -> None:
    """A failure hours later found the account of the first one, without what was used in between."""
    store.lose = True
    first = await accounts.reserve("alice", DAILY, text(100))
    store.lose = False
    await settled(accounts)
    await accounts.settle(first, text(100))
    await settled(accounts)
    assert len(await admitted(accounts, "alice", DAILY, *[text(100)] * 8)) == 8
    store.lose = True
    assert len(await admitted(accounts, "alice", DAILY, text(100), text(100))) == 1
    store.lose = False
    await settled(accounts)
    assert store.account.day_used[1] == 1000
    await accounts.aclose()


async def test_what_waits_is_written_at_the_end(accounts: SharedAccounts, store: Flaky) -> None:
    reservation = await accounts.reserve("alice", DAILY, text(100))
    store.lose = True
    await accounts.settle(reservation, text(10))
    store.lose = False
    await accounts.aclose()
    assert store.account.day_used[1] == 10


@pytest.mark.parametrize("on_failure", ["refuse", "local"])
async def test_a_tenant_never_learns_which_store_fails(
    on_failure: str, store: Flaky, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The address of Redis was once in the answer. The first failures, an outage, and reports are tried."""
    accounts = SharedAccounts(store, settings("redis://x", on_failure=on_failure, sharers=4), clock)
    store.lose, store.words = True, "Redis at 10.9.8.7:6379: Connection refused"
    errors = []
    for _ in range(2 * THRESHOLD):
        with pytest.raises(Unavailable) as refused:
            await accounts.reserve("alice", DAILY, text(251))
        errors.append(refused.value)
    with pytest.raises(Unavailable) as refused:
        await accounts.usage("alice", DAILY)
    assert {error.code for error in (*errors, refused.value)} == {"accounts_unavailable"}
    for error in (*errors, refused.value):
        assert error.message.startswith("accounts cannot be read at present")
        assert "10.9.8.7" not in error.message
        assert "Redis" not in error.message
    assert sum("10.9.8.7:6379" in line for line in caplog.messages) == 2, "once, and as the outage begins"
    store.lose = False
    await accounts.aclose()


async def test_a_locked_file_is_an_outage_that_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "accounts.db"
    accounts = open_accounts(settings(f"sqlite:{path}", on_failure="local", timeout_s=0.3))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with caplog.at_level(logging.INFO, "fovea.gateway"):
        held = await admitted(accounts, "alice", DAILY, *[text(100)] * 12)
        assert len(held) == 10
        assert accounts.stats()["failing"] == 1
        other.execute("ROLLBACK")
        other.close()
        while accounts.stats()["failing"] or accounts.stats()["pending"]:
            await asyncio.sleep(0.001)
    assert (await accounts.usage("alice", DAILY)).day_used == (10, 1000, 0, 0)
    first, second, last = caplog.messages
    assert first.startswith("the store of the accounts has failed once: ")
    assert second.startswith("the store of the accounts fails: ")
    assert last == "the store of the accounts works again"
    await accounts.aclose()


def test_pending_changes_come_out_in_their_order_and_within_their_number(clock: Clock) -> None:
    pending, now = Pending(3, sharers=1), int(clock() * 1e6)
    for number in range(5):
        pending.end("alice", DAILY.bounds, difference(str(number), text(2), text(1), 5, 60))
    pending.carry("bob", DAILY.bounds, 5, (1, 7, 0, 3), now)
    pending.carry("bob", DAILY.bounds, 5, (0, -2, 0, 1), now)
    assert (len(pending), pending.dropped) == (3, 3)
    first = pending.first(now)
    assert first is not None
    pending.put_back(first, now)
    changes = [pending.first(now) for _ in range(4)]
    assert [change and change.change.lease for change in changes] == ["3", "4", "", None]
    carried = changes[2]
    assert carried is not None
    assert (carried.tenant, carried.change.day, carried.change.day_used) == ("bob", 5, (1, 5, 0, 4))
    assert carried.change.month_cost == 4
