"""Two gateways share one limit: together they admit what one would, also if one of them is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fovea.core.errors import ConfigError
from fovea.gateway.tenants.accounts import open_accounts
from fovea.gateway.tenants.keys import TenantLimits
from tests.gateway.tenants.support import Clock, admitted, settings, text
from tests.support.servers import RedisServer

ROOT = Path(__file__).resolve().parents[3]


def start(where: str, requests: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gateway.tenants.admit", where, str(requests)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def admit_together(where: str) -> int:
    """Return how many of 64 requests of 100 tokens two processes admit."""
    processes = [start(where, 32) for _ in range(2)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return sum(int(process.communicate()[0]) for process in processes)


def test_two_processes_share_a_file(tmp_path: Path) -> None:
    assert admit_together(f"sqlite:{tmp_path / 'accounts.db'}") == 10


def test_two_processes_share_redis(own_redis: RedisServer) -> None:
    assert admit_together(own_redis.url) == 10


async def test_a_killed_process_leaves_whole_transactions(tmp_path: Path) -> None:
    """Its places come back after the lease time, and what it reserved stays taken."""
    where, clock = f"sqlite:{tmp_path / 'accounts.db'}", Clock()
    limits = TenantLimits(max_in_flight=100, text_tokens_per_day=10**9)
    process = start(where, 10**6)
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    accounts = open_accounts(settings(where, lease_s=10.0), clock)
    reservations = await admitted(accounts, "bob", limits, *[text(1)] * 100)
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()
    await accounts.aclose()
    again = open_accounts(settings(where, lease_s=10.0), clock)
    assert len(reservations) == 100
    assert await admitted(again, "bob", limits, text(1)) == []
    clock.now += 10
    assert len(await admitted(again, "bob", limits, text(1))) == 1
    assert (await again.usage("bob", limits)).day_used[1] == 101
    await again.aclose()


def test_a_file_that_cannot_be_opened_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used for accounts: unable to open database file"):
        open_accounts(settings(f"sqlite:{tmp_path / 'missing' / 'accounts.db'}"))


def test_a_url_that_redis_does_not_know_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="the URL of Redis is not accepted"):
        open_accounts(settings("redis://host:port/0"))
