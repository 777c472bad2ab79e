"""The usage log: sums of usage per hour, written to a file by a thread.

The event loop appends a record to a queue, and does nothing else. The thread takes the queue about once a
second, sums the records by row, and writes the sums in one transaction. If the process is killed, the last
second is lost at most. If the disk is slow, or another process holds the file, records stay in memory as
sums, so memory is bounded by the number of rows (`usage_rows`), however long that lasts, and nothing is lost.
When the queue is full because the thread waits for the disk, the event loop adds to the sums itself.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fovea.core.settings import check_settings, setting
from fovea.gateway.usage.store import Batch, Key, UsageRecord, key_of, sums_of

log = logging.getLogger("fovea.gateway.usage")
QUEUE = 4096
"""Most records that wait to be summed by the thread."""
COMPLAIN_S = 60.0
"""Seconds between warnings while the file cannot be written."""
_HOUR_S = 3600.0


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


class Store(Protocol):
    """A place for the sums: `UsageStore`."""

    def write(self, rows: Iterable[tuple[Key, Sequence[float]]], /) -> None: ...

    def forget(self, before_hour: int, /) -> None: ...

    def close(self) -> None: ...


class UsageLog:
    """Collects usage and writes it with a thread of its own, which starts now.

    store: an open usage file. The log closes it.
    clock: returns the time in seconds of the epoch.
    """

    def __init__(self, store: Store, settings: UsageSettings, clock: Callable[[], float] = time.time) -> None:
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
