"""The usage log: sums of usage per hour, written by a thread to an SQLite file, and read by reports.

The event loop appends a record to a queue, and does nothing else. The thread takes the queue about once a
second, sums the records by row, and writes the sums in one transaction. If the process is killed, the last
second is lost at most. If the disk is slow, or another process holds the file, records stay in memory as
sums, so memory is bounded by the number of rows (`usage_rows`), however long that lasts, and nothing is lost.
When the queue is full because the thread waits for the disk, the event loop adds to the sums itself.

The file has a row per hour, tenant, model, backend and origin of the answer. Several processes write to one
file. It is in WAL mode, so readers and writers do not wait for each other, and what was committed survives
the end of the process, whatever ended it (not a failure of power, which may lose the last seconds, but leaves
the file whole).
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting
from fovea.gateway.sqlite_wal import use_wal
from fovea.gateway.usage.prices import Consumption, Price

ServedFrom = Literal["backend", "response_cache", "fallback"]
SERVED_FROM: tuple[ServedFrom, ...] = ("backend", "response_cache", "fallback")
OTHER = "(other)"
"""Stands for tenants, models and backends that were too many to be counted apart."""
LONGEST_NAME = 200
MOST_COUNT = 10**12
"""Most tokens, or millionths, of one request that are believed. Sums of more could exceed 64 bits."""
SUMS = (
    "requests", "errors", "estimated", "images", "prompt_tokens", "visual_tokens", "cached_tokens",
    "completion_tokens", "cost", "credit", "visual_cost", "seconds",
)  # fmt: skip
"""Names of the sums of a row. cost, credit, visual_cost: millionths of the currency. seconds: a float."""
COUNTS = SUMS[:8]
MONEY = ("cost", "credit", "cost_per_request", "cost_per_image")
VERSION = 1
BUSY_S = 5.0
"""Seconds that a write waits for another process to end its write."""
GROUPS = {
    "tenant": "tenant",
    "model": "model",
    "backend": "backend",
    "served_from": "served_from",
    "day": "date(hour * 3600, 'unixepoch')",
    "hour": "strftime('%Y-%m-%d %H:00', hour * 3600, 'unixepoch')",
}
"""SQL of the names by which rows can be grouped. Days and hours are those of UTC."""
log = logging.getLogger("fovea.gateway.usage")
QUEUE = 4096
"""Most records that wait to be summed by the thread."""
COMPLAIN_S = 60.0
"""Seconds between warnings while the file cannot be written."""
_HOUR_S = 3600.0


class UsageLog:
    """Collects usage and writes it with a thread of its own, which starts now.

    store: an open usage file. The log closes it.
    clock: returns the time in seconds of the epoch.
    """

    def __init__(
        self, store: UsageStore, settings: UsageSettings, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._queue: deque[UsageRecord] = deque()
        self._lock = threading.Lock()  # of _batch
        self._batch = Batch(settings.usage_rows)
        self._wake = threading.Event()
        self._ending = False
        self._round = threading.Condition()
        self._rounds_asked = self._rounds_done = 0
        self._complained_s: float | None = None
        self._forgot_s = float("-inf")
        self._thread = threading.Thread(target=self._run, name="fovea-usage", daemon=True)
        self._thread.start()

    def add(self, record: UsageRecord) -> None:
        """Record a request. This does not wait for the disk."""
        if len(self._queue) < QUEUE:
            self._queue.append(record)
            return
        with self._lock:
            self._batch.add(key_of(record), sums_of(record))

    @property
    def rows(self) -> int:
        """Number of rows in memory that wait to be written."""
        return len(self._batch.rows)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Write what was recorded before this call, and wait for it. False: it is not written (yet)."""
        with self._round:
            self._rounds_asked += 1
            wanted = self._rounds_asked
            self._wake.set()
            done = self._round.wait_for(lambda: self._rounds_done >= wanted, timeout_s)
        return done and not self._batch.rows

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is left, and end the thread. A warning says if that was not possible."""
        self._ending = True
        self._wake.set()
        self._thread.join(timeout_s)
        left = sum(int(sums[0]) for sums in self._batch.rows.values()) + len(self._queue)
        if left:
            log.warning("the usage of %s requests could not be written and is lost", f"{left:,}")

    def _run(self) -> None:
        while not self._ending:
            self._wake.wait(self._settings.usage_write_s)
            self._wake.clear()
            self._step()
        self._step()
        self._store.close()

    def _step(self) -> None:
        """Sum the queue, write the sums, and remove old rows now and then."""
        with self._round:
            asked = self._rounds_asked
        try:
            self._write(self._take())
            self._forget()
        except (sqlite3.Error, OSError) as error:
            self._complain(error)
        with self._round:
            self._rounds_done = asked
            self._round.notify_all()

    def _take(self) -> Batch:
        """Return the sums so far and begin new ones."""
        with self._lock:
            batch, self._batch = self._batch, Batch(self._settings.usage_rows)
        for _ in range(len(self._queue)):
            record = self._queue.popleft()
            batch.add(key_of(record), sums_of(record))
        return batch

    def _write(self, batch: Batch) -> None:
        if not batch.rows:
            return
        try:
            self._store.write(list(batch.rows.items()))
        except BaseException:
            with self._lock:
                self._batch.merge(batch)
            raise
        if self._complained_s is not None:
            self._complained_s = None
            log.info("usage is written again")

    def _forget(self) -> None:
        now_s = self._clock()
        if self._settings.usage_days and now_s - self._forgot_s >= _HOUR_S:
            self._store.forget(int(now_s // _HOUR_S) - 24 * self._settings.usage_days)
            self._forgot_s = now_s

    def _complain(self, error: Exception) -> None:
        now_s = self._clock()
        if self._complained_s is None or now_s - self._complained_s >= COMPLAIN_S:
            self._complained_s = now_s
            log.warning("usage cannot be written; it stays in memory and is tried again: %s", error)


class UsageRecord(NamedTuple):
    """The usage of one request.

    at_s: time of its end, in seconds of the epoch.
    model: the model that answered.
    backend: name of the backend that answered; empty: none did.
    served_from: backend: the first choice answered, or none did; fallback: another backend or model answered.
    error: whether the client got an error.
    seconds: from its arrival to its end.
    """

    at_s: float
    tenant: str
    model: str
    backend: str
    served_from: ServedFrom
    error: bool
    consumption: Consumption
    price: Price
    seconds: float


class Key(NamedTuple):
    """The requests that are summed in one row. hour: hours since the epoch."""

    hour: int
    tenant: str
    model: str
    backend: str
    served_from: str


def key_of(record: UsageRecord) -> Key:
    """Return the row to which a request belongs. Long names are cut."""
    return Key(
        int(record.at_s // 3600),
        record.tenant[:LONGEST_NAME],
        record.model[:LONGEST_NAME],
        record.backend[:LONGEST_NAME],
        record.served_from,
    )


def sums_of(record: UsageRecord) -> list[float]:
    """Return what a request adds to the sums of its row, in the order of SUMS.

    A request with a count above MOST_COUNT, which a broken backend may report, is counted as estimated, and
    without tokens and costs.
    """
    if max(*record.consumption, *record.price) > MOST_COUNT:
        nothing = Consumption(images=record.consumption.images, estimated=True)
        return sums_of(record._replace(consumption=nothing, price=Price(0, estimated=True)))
    prompt, visual, cached, completion, images, _ = record.consumption
    cost, credit, visual_cost, estimated = record.price
    return [
        1, int(record.error), int(estimated), images, prompt, visual, cached, completion,
        cost, credit, visual_cost, record.seconds,
    ]  # fmt: skip


class Batch:
    """Sums of requests by row, with a bound on the number of rows.

    most: most rows. Beyond it, requests are summed under the name OTHER. No request is lost.
    """

    __slots__ = ("rows", "_most")

    def __init__(self, most: int) -> None:
        self.rows: dict[Key, list[float]] = {}
        self._most = most

    def add(self, key: Key, sums: Sequence[float]) -> None:
        """Add the sums of one or several requests."""
        row = self.rows.get(key)
        if row is None and len(self.rows) >= self._most:
            key = Key(key.hour, OTHER, OTHER, OTHER, key.served_from)
            row = self.rows.get(key)
        if row is None:
            self.rows[key] = list(sums)
            return
        for place, value in enumerate(sums):
            row[place] += value

    def merge(self, other: Batch) -> None:
        """Add all rows of another batch."""
        for key, sums in other.rows.items():
            self.add(key, sums)


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

    Raises ConfigError if the file cannot be opened, is not a usage file, or has another currency.
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
        mode = use_wal(connection, BUSY_S)
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


class Row(NamedTuple):
    """Sums of the requests of one group.

    group: its values, in the order of the names that it is grouped by.
    cost, credit, visual_cost: in millionths of the currency.
    seconds: sum of the requests' durations.
    """

    group: tuple[str, ...]
    requests: int = 0
    errors: int = 0
    estimated: int = 0
    images: int = 0
    prompt_tokens: int = 0
    visual_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: int = 0
    credit: int = 0
    visual_cost: int = 0
    seconds: float = 0.0

    @property
    def cost_per_request(self) -> float:
        """Millionths of the currency."""
        return self.cost / self.requests if self.requests else 0.0

    @property
    def cost_per_image(self) -> float:
        """The part of the cost that images cause, per image; millionths of the currency."""
        return self.visual_cost / self.images if self.images else 0.0


class Report(NamedTuple):
    """Usage of a period: a row per group, and the sums of all of them. currency: three letters."""

    currency: str
    rows: tuple[Row, ...]
    total: Row


def read_usage(path: Path, by: Sequence[str], since_hour: int, until_hour: int) -> Report:
    """Read the usage of a period.

    by: names of GROUPS.
    since_hour, until_hour: hours since the epoch; the first is included, the last is not.

    Raises ConfigError if the file cannot be read or is not a usage file.
    """
    group = ", ".join(GROUPS[name] for name in by)
    sums = ", ".join(f"COALESCE(SUM({name}), 0)" for name in SUMS)
    period = "FROM usage WHERE hour >= ? AND hour < ?"
    numbers = ", ".join(str(place + 1) for place in range(len(by)))
    if not path.exists():
        raise ConfigError(f"usage file {path} does not exist", param="file")
    try:
        with closing(_connect(path)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != VERSION:
                raise ConfigError(
                    f"{path} is not a usage file of this version of Fovea (its version is {version})",
                    param="file",
                )
            connection.execute("BEGIN")  # both queries see the same state
            (currency,) = connection.execute("SELECT name FROM currency").fetchone()
            rows = connection.execute(
                f"SELECT {group}, {sums} {period} GROUP BY {numbers} ORDER BY {numbers}",
                (since_hour, until_hour),
            ).fetchall()
            total = connection.execute(f"SELECT {sums} {period}", (since_hour, until_hour)).fetchone()
    except sqlite3.Error as error:
        raise ConfigError(f"usage file {path} cannot be read: {error}", param="file") from error
    count = len(by)
    return Report(currency, tuple(Row(row[:count], *row[count:]) for row in rows), Row(("",) * count, *total))


def fields_of(row: Row, by: Sequence[str]) -> dict[str, Any]:
    """Return the values of a row by name; money in units of the currency. by: the names of its group."""
    return {
        **dict(zip(by, row.group, strict=False)),
        **{name: getattr(row, name) for name in COUNTS},
        **{name: round(getattr(row, name) / 1e6, 6) for name in MONEY},
        "seconds": round(row.seconds, 3),
    }


def _connect(path: Path) -> sqlite3.Connection:
    """Open a file to read it.

    A file in WAL mode is read with a second file, which SQLite creates if no gateway is running. In a folder
    where that is not allowed, the file is read as one that does not change: if its WAL is empty, no gateway
    writes to it.
    """
    address = f"file:{quote(str(path.absolute()))}?mode=ro"
    connection = sqlite3.connect(address, uri=True, timeout=BUSY_S, isolation_level=None)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        log = Path(f"{path}-wal")
        if log.exists() and log.stat().st_size:
            raise
        connection = sqlite3.connect(f"{address}&immutable=1", uri=True, timeout=BUSY_S, isolation_level=None)
    return connection


@dataclass(frozen=True, slots=True)
class UsageSettings:
    """Settings of the usage log."""

    usage_file: str = setting("", "Path of the usage file. Empty: no usage is recorded.")
    usage_write_s: float = setting(1.0, "Seconds between writes of the usage file.", low=0.01, high=3600)
    usage_days: int = setting(
        400, "Days after which usage is removed from the file. 0: never.", low=1, high=36_500, or_zero=True
    )
    usage_rows: int = setting(
        10_000,
        "Most rows of usage (tenants, models, backends) between two writes. "
        "Further ones are counted together as (other).",
        low=10,
        high=10**6,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def path(self) -> Path | None:
        """The usage file; None: no usage is recorded."""
        return Path(self.usage_file).expanduser() if self.usage_file else None
