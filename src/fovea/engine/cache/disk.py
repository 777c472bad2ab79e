"""A store of encoder outputs on disk. It survives a restart, and several processes may share one folder.

A key must contain everything that decides the value: picture, processor settings, the encoder's weights, the
tenant's salt. Then all values of one key are equal. No error of the disk is raised to a caller: a damaged
file is a miss, and if the folder cannot be used, the store turns itself off and every read is a miss.

A `DiskFolder` is the folder itself: its size, and the eviction of files. It raises OSError; `DiskStore` does
not.

Processes that share a folder do not communicate, and there is no lock file, which a killed process could
leave behind. Three properties of the file system make that safe. A rename makes a whole file visible at once.
A file is read through a descriptor that stays valid if the file is removed. And any process may remove any
file, because a miss recomputes.

Each process knows the size of the folder from its latest scan, plus its own writes since then. It scans the
folder again before it has written a sixteenth of the capacity, when by its count no room is left, and every
few minutes.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fovea.core.private_files import exposure
from fovea.engine.cache.disk_files import (
    Arrays,
    BadFile,
    CacheFile,
    ForeignFile,
    decode,
    encode,
    measure,
    path_of,
    read_file,
    scan,
    write_file,
)
from fovea.engine.cache.host import WriteQueue

ABANDONED_S = 600.0
"""A temporary file of this age in seconds was left by a process that died while it wrote."""
SLACK = 16
"""Divisor of the capacity, for two limits.

A sweep removes at most capacity / SLACK more than it must. A process writes at most that much between two
sweeps.
"""
log = logging.getLogger("fovea.engine")
# Errors that pass: they fail the current read or write, but do not turn the store off.
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ESTALE}


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
            Path(folder).absolute(), capacity_bytes, ttl_s=ttl_s, rescan_s=rescan_s, clock=clock
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


@dataclass(slots=True)
class Usage:
    """The use of a folder.

    bytes, entries: of the whole folder, as far as this process knows.
    evictions: entries that this process removed for lack of room.
    expirations: entries that this process removed because of their age.
    """

    bytes: int = 0
    entries: int = 0
    evictions: int = 0
    expirations: int = 0


class DiskFolder:
    """A folder with at most `capacity` bytes of entries. Thread-safe."""

    def __init__(
        self, path: Path, capacity: int, *, ttl_s: float | None, rescan_s: float, clock: Callable[[], float]
    ) -> None:
        """ttl_s: entries expire after so many seconds; None: never.

        rescan_s: most seconds between two scans.
        """
        self.path = path
        self.capacity = capacity
        self._ttl_s = ttl_s
        self._rescan_s = rescan_s
        self._clock = clock
        self._usage_lock = threading.Lock()  # guards `_usage`; never held during input or output
        self._write_lock = threading.RLock()  # allows one write or sweep at a time in this process
        self._usage = Usage()
        self._unswept_bytes = 0  # written since the last sweep
        self._swept_at = clock()

    def open(self) -> None:
        """Create the folder if necessary, and check that it can be used. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(0o700)
        os.listdir(self.path)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError("it cannot be written")
        # Whoever can write here decides what the model sees.
        reason = exposure(self.path, may_be_link=True)
        if reason is not None:
            raise PermissionError(reason)

    def usage(self) -> Usage:
        with self._usage_lock:
            return replace(self._usage)

    def find(self, key: str) -> CacheFile | None:
        """The entry of `key`, or None. A stale entry is removed. Raises ForeignFile, OSError."""
        file = measure(path_of(self.path, key))
        if file is not None and self._is_stale(file, self._clock()):
            self._expire(file)
            return None
        return file

    def read(self, file: CacheFile) -> bytearray:
        """Read an entry and mark it as used. Raises BadFile, OSError."""
        return read_file(file.path, self.capacity, self._clock())

    def write(self, key: str, pieces: list[memoryview]) -> bool:
        """Write the entry of `key`. Returns False if there is no room for it. Raises ForeignFile, OSError."""
        path = path_of(self.path, key)
        size = sum(len(piece) for piece in pieces)
        with self._write_lock:
            if not self._make_room(size):
                return False
            old = measure(path)
            write_file(path, pieces, self._clock())
            self._account(size - (old.size if old else 0), 0 if old else 1)
            self._unswept_bytes += size
            return True

    def remove(self, item: CacheFile) -> bool:
        """Remove a file.

        Returns False if another process removed it first. Raises OSError if it cannot be removed.
        """
        try:
            os.unlink(item.path)
        except (FileNotFoundError, NotADirectoryError):
            is_ours = False
        else:
            is_ours = True
        self._account(-item.size, 0 if item.temporary else -1)
        return is_ours

    def clear(self) -> None:
        """Remove all entries and temporary files.

        A process whose temporary file is removed writes it again.
        """
        with self._write_lock:
            for file in scan(self.path):
                self.remove(file)
            self.sweep()

    def sweep(self, reserve: int = 0) -> None:
        """Scan the folder; remove stale files, then least recently used entries until `reserve` bytes fit.

        A full folder is emptied a little further, so that not every write needs a scan.
        """
        with self._write_lock:
            now = self._clock()
            files = sorted(scan(self.path))
            for item in files:
                if self._is_stale(item, now):
                    self._expire(item)
            fresh = [item for item in files if not self._is_stale(item, now)]
            entries = [item for item in fresh if not item.temporary]
            count, total = len(entries), sum(item.size for item in fresh)
            ceiling = self.capacity - reserve
            low = ceiling - self.capacity // SLACK
            for item in entries if total > ceiling else ():
                if total <= ceiling and total - item.size < low:
                    break
                removed = self.remove(item)
                total -= item.size
                count -= 1
                with self._usage_lock:
                    self._usage.evictions += removed
            self._unswept_bytes = 0
            self._swept_at = now
            with self._usage_lock:
                self._usage.bytes, self._usage.entries = total, count

    def _make_room(self, size: int) -> bool:
        """Make room before a write. So a store that does not share its folder never exceeds its ceiling."""
        if size > self.capacity:
            return False
        full = self.usage().bytes + size > self.capacity
        overdue = self._unswept_bytes + size > self.capacity // SLACK
        if full or overdue or self._clock() - self._swept_at >= self._rescan_s:
            self.sweep(size)
        return self.usage().bytes + size <= self.capacity

    def _is_stale(self, item: CacheFile, now: float) -> bool:
        if item.temporary:
            return now - item.written_at > ABANDONED_S
        return self._ttl_s is not None and now - item.written_at >= self._ttl_s

    def _expire(self, item: CacheFile) -> None:
        if self.remove(item) and not item.temporary:
            with self._usage_lock:
                self._usage.expirations += 1

    def _account(self, size: int, entries: int) -> None:
        with self._usage_lock:
            self._usage.bytes = max(0, self._usage.bytes + size)
            self._usage.entries = max(0, self._usage.entries + entries)


class DatedArrays(NamedTuple):
    """An entry, and the time when it was written, in seconds of the store's clock."""

    arrays: Arrays
    written_at: float
