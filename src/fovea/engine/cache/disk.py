"""A store of encoder outputs on disk. It survives a restart, and several processes may share one folder.

A key must contain everything that decides the value: picture, processor settings, the encoder's weights, the
tenant's salt. Then all values of one key are equal. No error of the disk is raised to a caller: a damaged
file is a miss, and if the folder cannot be used, the store turns itself off and every read is a miss.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fovea.engine.cache.arrays import Arrays, BadFile, decode, encode
from fovea.engine.cache.disk_files import CacheFile, ForeignFile
from fovea.engine.cache.disk_folder import DiskFolder
from fovea.engine.cache.write_queue import WriteQueue

log = logging.getLogger("fovea.engine")

# Errors that pass: they fail the current read or write, but do not turn the store off.
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ESTALE}


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Counters of a disk store, for this process.

    drops: writes that were given up: the queue is full, the entry too large, the store off or closed, or the
        disk fails.
    evictions: entries removed for lack of room.
    expirations: entries removed because of their age.
    corrupt: damaged files.
    bytes, entries: of the whole folder, as far as this process knows.
    queued_bytes: values in memory that wait to be written.
    off: why the store turned itself off; None: it is on.
    """

    hits: int
    misses: int
    writes: int
    drops: int
    evictions: int
    expirations: int
    corrupt: int
    bytes: int
    entries: int
    queued_bytes: int
    off: str | None


class DatedArrays(NamedTuple):
    """An entry, and the time when it was written, in seconds of the store's clock."""

    arrays: Arrays
    written_at: float


class DiskStore:
    """A store of at most `capacity_bytes` in `folder`.

    The least recently used entry is evicted first. Thread-safe.

    Arrays that are passed to `put` must not change until they are written. `read` reads the file in the
    calling thread and verifies its checksum, which takes a second per gigabyte and releases the interpreter's
    lock.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        ttl_s: float | None = None,
        queue_bytes: int = 256 << 20,
        rescan_s: float = 300.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """ttl_s: entries expire after so many seconds; None: never.

        queue_bytes: ceiling of the values in memory that wait to be written.
        rescan_s: after at most so many seconds, changes that other processes make to the folder are noticed.
        """
        self._folder = DiskFolder(
            Path(folder).absolute(),
            capacity_bytes,
            ttl_s=ttl_s,
            rescan_s=rescan_s,
            clock=clock,
        )
        self._clock = clock
        self._state = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._off: str | None = None
        self._attempt(self._folder.open)
        self._queue: WriteQueue[Arrays] = WriteQueue(
            self._store, self.sweep, name="fovea-disk", limit=queue_bytes, every_s=rescan_s
        )

    def read(self, key: str) -> DatedArrays | None:
        """The entry and the time when it was written, or None. The entry is marked as used."""
        entry = None
        if self._off is None:
            waiting = self._queue.pending_value(key)
            entry = self._read(key) if waiting is None else DatedArrays(waiting, self._clock())
        self._count("misses" if entry is None else "hits")
        return entry

    def put(self, key: str, arrays: Arrays) -> None:
        """Queue an entry for the writing thread. It is dropped, and counted, if the queue is full."""
        accepts = self._off is None and arrays.nbytes <= self._folder.capacity
        if not accepts or not self._queue.submit(key, arrays):
            self._count("drops")

    def __contains__(self, key: str) -> bool:
        """Whether there is an entry. Its file is not opened, so `read` may still find that it is damaged."""
        if self._off is not None:
            return False
        return self._queue.pending_value(key) is not None or self._find(key) is not None

    def drop(self, key: str) -> None:
        self._queue.cancel(key)
        file = self._find(key)
        if file is not None:
            self._attempt(lambda: self._folder.remove(file))

    def clear(self) -> None:
        """Remove every entry. A store that is off tries its folder again."""
        self._queue.cancel_all()
        with self._state:
            self._off = None
            self._warned.clear()
        self._attempt(self._folder.open)
        if self._off is None:
            self._attempt(self._folder.clear)

    def sweep(self) -> None:
        """Scan the folder; remove expired entries, and entries above the ceiling.

        The writing thread does this regularly.
        """
        if self._off is None:
            self._attempt(self._folder.sweep)

    def stats(self) -> DiskStats:
        usage, queued = self._folder.usage(), self._queue.bytes
        with self._state:
            return DiskStats(
                hits=self._counts["hits"],
                misses=self._counts["misses"],
                writes=self._counts["writes"],
                drops=self._counts["drops"],
                evictions=usage.evictions,
                expirations=usage.expirations,
                corrupt=self._counts["corrupt"],
                bytes=usage.bytes,
                entries=usage.entries,
                queued_bytes=queued,
                off=self._off,
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all entries so far are on disk.

        Returns False if that takes more than `timeout` seconds.
        """
        return self._queue.flush(timeout)

    def close(self, timeout: float | None = 10.0) -> None:
        """Write waiting entries for up to `timeout` seconds and drop the rest.

        Later reads work, later puts are dropped.
        """
        self._count("drops", self._queue.close(timeout))

    def _find(self, key: str) -> CacheFile | None:
        try:
            return self._folder.find(key)
        except ForeignFile as error:
            self._warn_once(error.path, f"{error}; left alone")
        except OSError as error:
            self._trouble(error)
        return None

    def _read(self, key: str) -> DatedArrays | None:
        file = self._find(key)
        if file is None:
            if not self._folder.path.is_dir():
                self._trouble(FileNotFoundError("the folder was removed"))
            return None
        try:
            return DatedArrays(decode(self._folder.read(file), key), file.written_at)
        except FileNotFoundError:
            return None  # another process evicted it after `find`
        except BadFile as error:
            self._count("corrupt")
            self._remove_bad(file, error)
        except OSError as error:
            self._warn_once(file.path, f"{error}; left alone")
        return None

    def _remove_bad(self, file: CacheFile, why: BadFile) -> None:
        try:
            self._folder.remove(file)
        except OSError as error:
            self._warn_once(file.path, f"{why}; it cannot be removed ({error})")
        else:
            log.warning("disk cache: %s is not used: %s; removed", file.path, why)

    def _store(self, key: str, arrays: Arrays) -> None:
        """Write an entry; called in the writing thread."""
        stored = self._off is None and self._write(key, encode(key, arrays))
        self._count("writes" if stored else "drops")

    def _write(self, key: str, pieces: list[memoryview]) -> bool:
        for _ in range(2):
            try:
                return self._folder.write(key, pieces)
            except FileNotFoundError as error:
                # Another process may have emptied the folder; then the second attempt works.
                if not self._folder.path.is_dir():
                    self._trouble(error)
                    return False
            except ForeignFile as error:
                self._warn_once(error.path, f"{error}; left alone")
                return False
            except OSError as error:
                self._trouble(error)
                return False
        return False

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            self._trouble(error)

    def _trouble(self, error: OSError) -> None:
        """Turn the store off with one warning, unless the error is one that passes."""
        if error.errno in _PASSING:
            self._warn_once(str(self._folder.path), str(error))
            return
        with self._state:
            known, self._off = self._off, self._off or str(error)
        if known is None:
            log.warning("disk cache: %s is not used any more: %s", self._folder.path, error)

    def _warn_once(self, path: str, why: str) -> None:
        with self._state:
            known = path in self._warned
            self._warned.add(path)
        if not known:
            log.warning("disk cache: %s is not used: %s", path, why)

    def _count(self, name: str, by: int = 1) -> None:
        with self._state:
            self._counts[name] += by
