"""Opens the accounts that the settings name."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from fovea.gateway.tenants.accounts import Accounts
from fovea.gateway.tenants.settings import AccountSettings


def open_accounts(settings: AccountSettings, clock: Callable[[], float] | None = None) -> Accounts:
    """Return accounts. Modules of stores that are not used are not imported.

    clock: returns the seconds of the epoch; None: the system's, or that of Redis.
    Raises ConfigError if the store cannot be used. Redis need not run yet.
    """
    kind, lease_s, timeout_s = settings.accounts, settings.accounts_lease_s, settings.accounts_timeout_s
    if kind == "memory":
        from fovea.gateway.tenants.memory import MemoryAccounts

        return MemoryAccounts(lease_s, clock or time.time)
    from fovea.gateway.tenants.shared import SharedAccounts

    if kind.startswith("sqlite:"):
        from fovea.gateway.tenants.sqlite_store import SqliteStore

        path = Path(kind.removeprefix("sqlite:")).expanduser().absolute()
        store = SqliteStore(path, timeout_s, lease_s, clock or time.time)
        return SharedAccounts(store, settings, clock or time.time)
    from fovea.gateway.tenants.redis_store import RedisStore

    return SharedAccounts(RedisStore(kind, timeout_s, lease_s, clock), settings, clock or time.time)
