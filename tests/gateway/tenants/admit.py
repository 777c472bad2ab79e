"""One gateway process of a test: it reserves many times at once, and prints how many were admitted.

    python -m tests.gateway.tenants.admit ACCOUNTS REQUESTS

It prints "ready", and begins when a line comes.
"""

from __future__ import annotations

import asyncio
import sys

from fovea.core.errors import Overloaded
from fovea.gateway.tenants.accounts import Accounts, open_accounts
from fovea.gateway.tenants.keys import TenantLimits
from tests.gateway.tenants.support import settings, text

LIMITS = TenantLimits(text_tokens_per_minute=1000)


async def admit(accounts: Accounts, requests: int) -> int:
    async def one() -> bool:
        try:
            await accounts.reserve("alice", LIMITS, text(100))
        except Overloaded:
            return False
        return True

    return sum(await asyncio.gather(*(one() for _ in range(requests))))


async def main(where: str, requests: int) -> None:
    accounts = open_accounts(settings(where))
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print(await admit(accounts, requests), flush=True)
    await accounts.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
