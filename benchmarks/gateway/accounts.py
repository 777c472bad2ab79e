"""Measure what the accounts of tenants cost a request of the gateway.

    python benchmarks/gateway/accounts.py [--requests 2000] [--at-once 16] [--stores memory,sqlite,redis]

For each store it reserves and settles requests, first one after the other, then `--at-once` at a time. It
prints the processor time of one reservation with its settlement, all threads of this process included, and
p50 and p99 of the time of each call. Redis is started on a free port; its own processor time is not included.
It also prints the time of `authenticate` with 1,000 keys, and of a tenant without limits. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fovea.access.keys import PREFIX, digest
from fovea.gateway.settings import AccountSettings
from fovea.gateway.tenants.accounts import Accounts, open_accounts
from fovea.gateway.tenants.keys import NO_LIMITS, TenantLimits, Tenants
from fovea.gateway.usage.prices import Amounts

LIMITS = TenantLimits(
    requests_per_minute=10_000_000,
    text_tokens_per_minute=1_000_000_000,
    visual_tokens_per_minute=1_000_000_000,
    cost_per_minute=1e6,
    requests_per_day=10**9,
    text_tokens_per_day=10**11,
    visual_tokens_per_day=10**11,
    cost_per_day=1e6,
    cost_per_month=1e6,
    max_in_flight=10_000,
)
RESERVED, USED = Amounts(1, 300, 900, 250), Amounts(1, 210, 900, 190)
KEYS = 1000
CALLS = 20_000


async def measure(accounts: Accounts, limits: TenantLimits, requests: int, at_once: int) -> dict[str, float]:
    """Reserve and settle, and return microseconds."""
    reserving: list[float] = []
    settling: list[float] = []

    async def worker(number: int) -> None:
        for _ in range(requests // at_once):
            began = time.perf_counter()
            reservation = await accounts.reserve(f"tenant{number % 4}", limits, RESERVED)
            middle = time.perf_counter()
            await accounts.settle(reservation, USED)
            reserving.append(middle - began)
            settling.append(time.perf_counter() - middle)

    await worker(0)  # connections, scripts and files are open from here on
    reserving.clear()
    settling.clear()
    began = time.process_time()
    await asyncio.gather(*(worker(number) for number in range(at_once)))
    spent = time.process_time() - began
    return {"cpu_us": 1e6 * spent / len(reserving)} | {
        f"{name}_{share}_us": 1e6 * sorted(values)[int(len(values) * part)]
        for name, values in (("reserve", reserving), ("settle", settling))
        for share, part in (("p50", 0.5), ("p99", 0.99))
    }


def measure_keys(folder: Path) -> float:
    """Return the microseconds of processor time that finding the tenant of a key takes."""
    path = folder / "keys.toml"
    hashes = [digest(f"key-{number}".encode()).hex() for number in range(KEYS)]
    path.write_text(
        "\n".join(f'[[key]]\nname = "t{i}"\nhash = "{PREFIX}{each}"' for i, each in enumerate(hashes))
    )
    path.chmod(0o600)
    tenants = Tenants(path)
    began = time.process_time()
    for _ in range(CALLS):
        tenants.authenticate(b"Bearer key-500")
    return 1e6 * (time.process_time() - began) / CALLS


@contextmanager
def redis_url(folder: Path) -> Iterator[str]:
    """Start a Redis that keeps nothing on disk, and yield its URL."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is not installed; accepted: --stores memory,sqlite")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.01)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


async def run(where: str, requests: int, at_once: int) -> dict[str, dict[str, float]]:
    accounts = open_accounts(AccountSettings(accounts=where, accounts_timeout_s=5.0))
    results = {
        "one": await measure(accounts, LIMITS, requests, 1),
        "many": await measure(accounts, LIMITS, requests, at_once),
        "unlimited": await measure(accounts, NO_LIMITS, 10 * requests, 1),
    }
    await accounts.aclose()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--stores", default="memory,sqlite,redis")
    args = parser.parse_args()
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results["authenticate_us"] = round(measure_keys(folder), 2)
        print(f"authenticate, {KEYS} keys: {results['authenticate_us']} us of processor time")
        with redis_url(folder) if "redis" in args.stores else nothing() as url:
            places = {"memory": "memory", "sqlite": f"sqlite:{folder / 'accounts.db'}", "redis": url}
            for store in args.stores.split(","):
                measured = asyncio.run(run(places[store], args.requests, args.at_once))
                results[store] = {
                    load: {key: round(value, 1) for key, value in values.items()}
                    for load, values in measured.items()
                }
                for load, values in measured.items():
                    print(f"{store:7}{load:10}", "  ".join(f"{k} {v:7.1f}" for k, v in values.items()))
    print(json.dumps(results))


@contextmanager
def nothing() -> Iterator[str]:
    yield ""


if __name__ == "__main__":
    main()
