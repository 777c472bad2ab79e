"""Accounts in an SQLite file, for all gateways of one machine.

All calls run in one thread, so the event loop never waits for the disk or for another process. The file is in
WAL mode; every call is one transaction that takes the write lock at its beginning (BEGIN IMMEDIATE), so that
two processes never both see the same room. A process that is killed leaves whole transactions.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from fovea.core.errors import ConfigError
from fovea.gateway.sqlite_wal import use_wal
from fovea.gateway.tenants.account import Account, Adjustment, Bounds, Counters, new_account
from fovea.gateway.tenants.shared import StoreFailed, births
from fovea.gateway.usage.prices import Amounts

T = TypeVar("T")
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS account (tenant TEXT PRIMARY KEY, counters TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS lease (tenant TEXT, id TEXT, ends INTEGER NOT NULL, "
    "PRIMARY KEY (tenant, id)) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS lease_ends ON lease (tenant, ends)",
)
_LONGEST_START_S = 10.0
"""Seconds to wait for other processes that open the file at the same time."""


class SqliteStore:
    """A store in one file.

    path: the file; it is created if it does not exist.
    timeout_s: longest wait of a call.
    lease_s: seconds after which a reservation that was not settled frees its place.
    clock: returns the seconds of the epoch.
    Raises ConfigError if the file cannot be opened.
    """

    def __init__(
        self, path: Path, timeout_s: float, lease_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._path, self._timeout_s, self._lease_us = path, timeout_s, round(lease_s * 1e6)
        self._clock = clock
        self._births = births()
        self._thread = ThreadPoolExecutor(1, "fovea-accounts")
        self._file: sqlite3.Connection | None = None
        try:
            self._thread.submit(self._open, _LONGEST_START_S).result()
        except sqlite3.Error as error:
            self._thread.shutdown()
            raise ConfigError(
                f"{path} cannot be used for accounts: {error}; accepted: a file in a folder that this user "
                "may write to",
                param="accounts",
            ) from error

    async def reserve(
        self, lease: str, tenant: str, bounds: Bounds, amounts: Amounts, known: Counters
    ) -> tuple[bool, Counters]:
        """Take all amounts and a place, or nothing."""

        def work(file: sqlite3.Connection) -> tuple[bool, Counters]:
            account = self._load(file, tenant, bounds, known)
            fits = account.fits(bounds, amounts)
            if fits:
                account.take(bounds, amounts)
                ends = account.at + self._lease_us
                file.execute("INSERT INTO lease VALUES (?, ?, ?)", (tenant, lease, ends))
                _save(file, tenant, account)
            return fits, account.counters()

        return await self._call(work)

    async def adjust(self, tenant: str, bounds: Bounds, change: Adjustment, known: Counters) -> Counters:
        """Apply a change and return the account."""

        def work(file: sqlite3.Connection) -> Counters:
            account = self._load(file, tenant, bounds, known)
            if change.lease:
                ended = file.execute("DELETE FROM lease WHERE tenant = ? AND id = ?", (tenant, change.lease))
                if not ended.rowcount:
                    return account.counters()
                account.in_flight -= 1
            account.adjust(bounds, change)
            _save(file, tenant, account)
            return account.counters()

        return await self._call(work)

    async def adopt(self, tenant: str, bounds: Bounds, leases: Sequence[str], known: Counters) -> Counters:
        """Register leases again."""

        def work(file: sqlite3.Connection) -> Counters:
            account = self._load(file, tenant, bounds, known)
            for lease in leases:
                ends = account.at + self._lease_us
                added = file.execute("INSERT OR IGNORE INTO lease VALUES (?, ?, ?)", (tenant, lease, ends))
                account.in_flight += added.rowcount
            _save(file, tenant, account)
            return account.counters()

        return await self._call(work)

    async def aclose(self) -> None:
        """Close the file. A call that hangs is left behind."""
        if self._file is not None:
            self._thread.submit(self._file.close)
        self._thread.shutdown(wait=False)

    async def _call(self, work: Callable[[sqlite3.Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await loop.run_in_executor(self._thread, partial(self._run, work))
        except TimeoutError:
            raise StoreFailed(f"{self._path} gave no answer in {self._timeout_s:g} s") from None
        except (sqlite3.Error, ValueError) as error:
            raise StoreFailed(f"{self._path}: {error}") from error

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run one transaction. In the thread. After an error, the file is opened again by the next call."""
        file = self._file or self._open(self._timeout_s)
        try:
            file.execute("BEGIN IMMEDIATE")
            result = work(file)
            file.execute("COMMIT")
            return result
        except (sqlite3.Error, ValueError):
            self._file = None
            file.close()  # rolls back
            raise

    def _open(self, timeout_s: float) -> sqlite3.Connection:
        file = sqlite3.connect(self._path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
        try:
            use_wal(file, timeout_s)
            file.execute("PRAGMA synchronous = NORMAL")
            for statement in _SCHEMA:
                file.execute(statement)
            file.execute(f"PRAGMA busy_timeout = {max(1, int(self._timeout_s * 1000))}")
        except sqlite3.Error:
            file.close()
            raise
        self._file = file
        return file

    def _load(self, file: sqlite3.Connection, tenant: str, bounds: Bounds, known: Counters) -> Account:
        """Return an account as it is now, without leases that have ended."""
        now = int(self._clock() * 1e6)
        row = file.execute("SELECT counters FROM account WHERE tenant = ?", (tenant,)).fetchone()
        if row is None:
            account = new_account(next(self._births), now)
        else:
            account = Account(Counters(*json.loads(row[0])))
            account.advance(bounds, now)
        account.restore(bounds, known)
        file.execute("DELETE FROM lease WHERE tenant = ? AND ends <= ?", (tenant, account.at))
        counted = file.execute("SELECT count(*) FROM lease WHERE tenant = ?", (tenant,)).fetchone()
        account.in_flight = counted[0]
        return account


def _save(file: sqlite3.Connection, tenant: str, account: Account) -> None:
    text = json.dumps(account.counters())
    file.execute("INSERT OR REPLACE INTO account VALUES (?, ?)", (tenant, text))
