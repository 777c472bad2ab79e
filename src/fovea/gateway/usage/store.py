"""The usage file: an SQLite database with a row per hour, tenant, model, backend and origin of the answer.

Several processes write to one file. It is in WAL mode, so readers and writers do not wait for each other, and
what was committed survives the end of the process, whatever ended it (not a failure of power, which may lose
the last seconds, but leaves the file whole).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from fovea.core.errors import ConfigError
from fovea.gateway.usage.record import SUMS, Key

VERSION = 1
BUSY_S = 5.0
"""Seconds that a write waits for another process to end its write."""
_KEYS = Key._fields
_TABLE = (
    "CREATE TABLE IF NOT EXISTS usage (hour INTEGER NOT NULL, "
    + "".join(f"{name} TEXT NOT NULL, " for name in _KEYS[1:])
    + "".join(f"{name} {'REAL' if name == 'seconds' else 'INTEGER'} NOT NULL, " for name in SUMS)
    + f"PRIMARY KEY ({', '.join(_KEYS)})) WITHOUT ROWID"
)
_ADD = (
    f"INSERT INTO usage ({', '.join((*_KEYS, *SUMS))}) VALUES ({', '.join('?' * (len(_KEYS) + len(SUMS)))}) "
    f"ON CONFLICT ({', '.join(_KEYS)}) DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in SUMS)
)


class UsageStore:
    """An open usage file, for one thread of one process.

    path: the file. It is created with mode 0600 if it does not exist.
    currency: the currency of the costs. A file has one currency.

    Raises ConfigError if the file cannot be opened, is no usage file, or has another currency.
    """

    def __init__(self, path: Path, currency: str) -> None:
        self._path = path
        self._currency = currency
        try:
            self._connection, self._file = self._open()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"usage file {path} cannot be opened: {error}", param="usage_file") from error

    def write(self, rows: Iterable[tuple[Key, Sequence[float]]]) -> None:
        """Add sums to the rows of the file, all or none. Raises sqlite3.Error or OSError.

        If the file was removed or replaced, a new one is begun.
        """
        self._reopen_if_replaced()
        with self._connection:  # commits, or rolls back
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(_ADD, [(*key, *sums) for key, sums in rows])

    def forget(self, before_hour: int) -> None:
        """Remove the rows of earlier hours. Raises sqlite3.Error or OSError."""
        self._reopen_if_replaced()
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute("DELETE FROM usage WHERE hour < ?", (before_hour,))

    def close(self) -> None:
        self._connection.close()

    def _reopen_if_replaced(self) -> None:
        try:
            status = self._path.stat()
            if (status.st_dev, status.st_ino) == self._file:
                return
        except FileNotFoundError:
            pass
        fresh = self._open()
        self._connection.close()
        self._connection, self._file = fresh

    def _open(self) -> tuple[sqlite3.Connection, tuple[int, int]]:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        status = os.fstat(descriptor)
        os.close(descriptor)
        connection = sqlite3.connect(
            self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection, (status.st_dev, status.st_ino)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise OSError(f"its file system does not support WAL (SQLite uses {mode!r})")
        connection.execute("PRAGMA synchronous = NORMAL")
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise OSError(f"it has version {version}; accepted: {VERSION}")
            if version == 0:
                if connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                    raise OSError("it is a database of another program")
                connection.execute(_TABLE)
                connection.execute("CREATE TABLE currency (name TEXT NOT NULL)")
                connection.execute("INSERT INTO currency VALUES (?)", (self._currency,))
                connection.execute(f"PRAGMA user_version = {VERSION}")
            (currency,) = connection.execute("SELECT name FROM currency").fetchone()
        if currency != self._currency:
            raise OSError(f"its costs are in {currency}, and the prices are in {self._currency}")
