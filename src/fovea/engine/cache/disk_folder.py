"""The folder of the disk cache: its size, and the eviction of files. It raises OSError; `DiskStore` does not.

Processes that share a folder do not communicate, and there is no lock file, which a killed process could
leave behind. Three properties of the file system make that safe. A rename makes a whole file visible at once.
A file is read through a descriptor that stays valid if the file is removed. And any process may remove any
file, because a miss recomputes.

Each process knows the size of the folder from its latest scan, plus its own writes since then. It scans the
folder again before it has written a sixteenth of the capacity, when by its count no room is left, and every
few minutes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fovea.core.private_files import exposure
from fovea.engine.cache.disk_files import CacheFile, measure, path_of, read_file, scan, write_file

ABANDONED_S = 600.0
"""A temporary file of this age in seconds was left by a process that died while it wrote."""
SLACK = 16
"""Divisor of the capacity, for two limits.

A sweep removes at most capacity / SLACK more than it must. A process writes at most that much between two
sweeps.
"""


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
        self,
        path: Path,
        capacity: int,
        *,
        ttl_s: float | None,
        rescan_s: float,
        clock: Callable[[], float],
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
