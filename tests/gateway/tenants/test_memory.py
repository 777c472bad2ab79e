"""Accounts in memory: what fits, words of refusals, windows, leases, and tenants without limits."""

from __future__ import annotations

import pytest

from fovea.core.errors import ConfigError, InvalidRequest, Overloaded
from fovea.gateway.tenants.accounts import FREE, MemoryAccounts, open_accounts
from fovea.gateway.tenants.keys import NO_LIMITS, TenantLimits
from fovea.gateway.usage.prices import Amounts
from tests.gateway.tenants.support import MONDAY, Clock, admitted, settings, text

LEASE_S = 100.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def accounts(clock: Clock) -> MemoryAccounts:
    return MemoryAccounts(LEASE_S, clock)


async def refused(accounts: MemoryAccounts, limits: TenantLimits, amounts: Amounts) -> Overloaded:
    with pytest.raises(Overloaded) as error:
        await accounts.reserve("alice", limits, amounts)
    return error.value


async def test_a_limit_per_minute_refills_and_settling_gives_back(
    accounts: MemoryAccounts, clock: Clock
) -> None:
    limits = TenantLimits(text_tokens_per_minute=1000)
    first, *_ = await admitted(accounts, "alice", limits, *[text(100)] * 10)
    error = await refused(accounts, limits, text(300))
    assert (error.code, error.retry_after) == ("rate_limit_exceeded", 18.0)
    assert error.message == (
        "key 'alice' asks for 300 text tokens; text_tokens_per_minute is 1000, and 0 are left; "
        "try again in 18 s"
    )
    await accounts.settle(first, text(40))
    await accounts.settle(first, text(40))
    assert (await refused(accounts, limits, text(61))).retry_after == pytest.approx(0.06)
    clock.now += 0.0625
    assert len(await admitted(accounts, "alice", limits, text(61))) == 1


async def test_settling_may_leave_a_debt(accounts: MemoryAccounts, clock: Clock) -> None:
    limits = TenantLimits(text_tokens_per_minute=600)
    reservation = await accounts.reserve("alice", limits, text(100))
    await accounts.settle(reservation, text(1200))
    error = await refused(accounts, limits, text(10))
    assert "and 0 are left" in error.message
    assert error.retry_after == pytest.approx(61.0)
    clock.now += 61
    assert len(await admitted(accounts, "alice", limits, text(10))) == 1


async def test_all_limits_are_taken_or_none(accounts: MemoryAccounts) -> None:
    limits = TenantLimits(requests_per_minute=10, visual_tokens_per_minute=100, cost_per_day=1)
    await accounts.reserve("alice", limits, Amounts(1, 5, 90, 1000))
    before = await accounts.usage("alice", limits)
    await refused(accounts, limits, Amounts(1, 5, 20, 1000))
    assert await accounts.usage("alice", limits) == before
    assert before.minute == (1, 0, 90, 0)
    assert before.day_used == (1, 5, 90, 1000)


async def test_the_longest_wait_is_named(accounts: MemoryAccounts) -> None:
    limits = TenantLimits(requests_per_minute=1, requests_per_day=1, max_in_flight=1)
    await accounts.reserve("alice", limits, text(1))
    error = await refused(accounts, limits, text(1))
    assert (error.code, error.retry_after) == ("budget_exceeded", 14 * 3600)
    assert error.message == (
        "key 'alice' asks for 1 request; requests_per_day is 1, and 0 are left; try again in 14.0 h"
    )


async def test_a_cost_is_shown_in_the_currency(accounts: MemoryAccounts, clock: Clock) -> None:
    limits = TenantLimits(cost_per_month=0.5)
    await accounts.reserve("alice", limits, Amounts(1, cost=400_000))
    clock.now += 20 * 86_400
    error = await refused(accounts, limits, Amounts(1, cost=125_000))
    assert error.message.startswith(
        "key 'alice' asks for a cost of 0.125; cost_per_month is 0.5, and 0.1 are left; try again in"
    )
    assert clock.now + error.retry_after == 1_769_904_000, "the first of February"
    clock.now = 1_769_904_000
    assert len(await admitted(accounts, "alice", limits, Amounts(1, cost=125_000))) == 1


async def test_a_day_begins_at_midnight_of_utc(accounts: MemoryAccounts, clock: Clock) -> None:
    limits = TenantLimits(text_tokens_per_day=100, cost_per_month=1)
    clock.now = MONDAY + 86_399
    late = await accounts.reserve("alice", limits, Amounts(1, 100, 0, 5))
    assert (await refused(accounts, limits, text(1))).retry_after == 1.0
    clock.now += 1
    early = await accounts.reserve("alice", limits, Amounts(1, 60, 0, 5))
    await accounts.settle(late, Amounts(1, 10, 0, 2))
    usage = await accounts.usage("alice", limits)
    assert usage.day_used == (1, 60, 0, 5), "a request counts on the day of its reservation"
    assert usage.month_cost == 7, "and in the month"
    await accounts.settle(early, Amounts(1, 70, 0, 5))
    assert (await accounts.usage("alice", limits)).day_used == (1, 70, 0, 5)


async def test_places_in_flight_and_leases(accounts: MemoryAccounts, clock: Clock) -> None:
    limits = TenantLimits(max_in_flight=2, text_tokens_per_day=1000)
    lost, done = await admitted(accounts, "alice", limits, *[text(100)] * 3)
    error = await refused(accounts, limits, text(1))
    assert (error.code, error.retry_after) == ("rate_limit_exceeded", 1.0)
    assert error.message == "key 'alice' has 2 requests in flight; accepted: at most 2 (max_in_flight)"
    await accounts.settle(done, text(0))
    clock.now += LEASE_S
    assert len(await admitted(accounts, "alice", limits, text(1), text(1), text(1))) == 2
    await accounts.settle(lost, text(0))
    usage = await accounts.usage("alice", limits)
    assert usage.in_flight == 2, "a reservation that comes back after its lease frees no place"
    assert usage.day_used[1] == 102, "and keeps its amounts"


@pytest.mark.parametrize(
    ("limits", "amounts", "name"),
    [
        (TenantLimits(text_tokens_per_minute=10), text(11), "may use at most 10 (text_tokens_per_minute)"),
        (TenantLimits(visual_tokens_per_day=10), Amounts(1, 0, 11), "at most 10 (visual_tokens_per_day)"),
        (TenantLimits(cost_per_minute=0.1), Amounts(cost=100_001), "0.100001 (cost), and key 'alice' may"),
        (TenantLimits(cost_per_month=0.1), Amounts(cost=100_001), "at most 0.1 (cost_per_month)"),
    ],
)
async def test_an_amount_that_never_fits_says_so(
    accounts: MemoryAccounts, limits: TenantLimits, amounts: Amounts, name: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        await accounts.reserve("alice", limits, amounts)
    assert name in error.value.message
    assert error.value.message.endswith("it can never be served")
    assert error.value.code == "key_limit_exceeded"


async def test_a_tenant_without_limits_has_no_account(accounts: MemoryAccounts) -> None:
    reservation = await accounts.reserve("alice", NO_LIMITS, text(10**9))
    assert reservation is FREE
    await accounts.settle(reservation, text(1))
    assert await accounts.usage("alice", NO_LIMITS) == (("", 0, (0,) * 4, 0, (0,) * 4, 0, 0, 0))
    unlimited = TenantLimits(max_visual_tokens=7, weight=3, models=("a",))
    assert await accounts.reserve("alice", unlimited, Amounts(1, 1, 7)) is FREE


async def test_lower_limits_count_what_was_used(accounts: MemoryAccounts) -> None:
    await accounts.reserve("alice", TenantLimits(text_tokens_per_minute=1000), text(700))
    error = await refused(accounts, TenantLimits(text_tokens_per_minute=500), text(100))
    assert error.retry_after == pytest.approx(300 * 60 / 500)


async def test_tenants_do_not_share_accounts(accounts: MemoryAccounts) -> None:
    limits = TenantLimits(requests_per_minute=1)
    assert len(await admitted(accounts, "alice", limits, text(1), text(1))) == 1
    assert len(await admitted(accounts, "bob", limits, text(1), text(1))) == 1
    assert set((accounts.stats()).values()) == {0}


async def test_limits_and_settings_refuse_wrong_values(clock: Clock) -> None:
    for wrong in ({"cost_per_day": 1e-7}, {"weight": 0.0}, {"cache_scope": "all"}, {"models": "a"}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is .*; accepted: "):
            TenantLimits(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="accounts is 'sqlite:'; accepted: memory, sqlite:PATH"):
        settings("sqlite:")
    memory = open_accounts(settings("memory", lease_s=5.0), clock)
    assert isinstance(memory, MemoryAccounts)
    await memory.aclose()
