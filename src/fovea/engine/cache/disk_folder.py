"""The folder of the disk cache: how much is in it, what goes when it is full. Raises OSError; `DiskStore` does not.

No process tells another anything, and there is no lock file that a killed one could leave behind. What keeps them apart
is the file system: a file appears whole by a rename, is read through a descriptor that outlives its name, and may be
removed by anyone at any time, because a miss recomputes. So each process only believes what it has seen, counts its own
writes in between, and looks at the whole folder again before it has written a sixteenth of the capacity, when there is
no room left by its count, and every few minutes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fovea.engine.cache.disk_files import Found, measure, path_of, read_file, scan, write_file

# A temporary file this old belongs to a process that died while it wrote.
ABANDONED_S = 600.0
# A sweep frees, and a process writes unseen by others, up to this part of the capacity.
SLACK = 16


@dataclass(slots=True)
class Usage:
    """`bytes` and `entries` are the folder's, as far as this process knows; the rest is what this process removed."""

    bytes: int = 0
    entries: int = 0
    evictions: int = 0
    expired: int = 0


class DiskFolder:
    """At most `capacity` bytes of entries, none older than `ttl_s` seconds. Threads may share it."""

    def __init__(
        self,
        path: Path,
        capacity: int,
        *,
        ttl_s: float | None,
        rescan_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.path = path
        self.capacity = capacity
        self._ttl_s = ttl_s
        self._rescan_s = rescan_s
        self._clock = clock
        self._counting = threading.Lock()  # guards `_usage`; held for no input or output
        self._changing = threading.RLock()  # one write or sweep at a time in this process
        self._usage = Usage()
        self._unseen = 0
        self._swept_at = clock()

    def open(self) -> None:
        """Make the folder, or see that it can be used. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(0o700)
        os.listdir(self.path)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError("it cannot be written")

    def usage(self) -> Usage:
        with self._counting:
            return replace(self._usage)

    def find(self, key: str) -> Found | None:
        """The entry of `key` unless it is too old, then it is removed. Raises NotOurs, OSError."""
        found = measure(path_of(self.path, key))
        if found is not None and self._is_stale(found, self._clock()):
            self._expire(found)
            return None
        return found

    def read(self, found: Found) -> bytearray:
        """The bytes of an entry, marked as used. Raises BadFile, OSError."""
        return read_file(found.path, self.capacity, self._clock())

    def write(self, key: str, pieces: list[memoryview]) -> bool:
        """Store a file for `key`. False: there is no room for it. Raises NotOurs, OSError."""
        path = path_of(self.path, key)
        size = sum(len(piece) for piece in pieces)
        with self._changing:
            if not self._make_room(size):
                return False
            old = measure(path)
            write_file(path, pieces, self._clock())
            self._account(size - (old.size if old else 0), 0 if old else 1)
            self._unseen += size
            return True

    def remove(self, item: Found) -> bool:
        """Remove a file. False: another process was faster. Raises OSError when it cannot be removed."""
        try:
            os.unlink(item.path)
        except (FileNotFoundError, NotADirectoryError):
            gone = False
        else:
            gone = True
        self._account(-item.size, 0 if item.temporary else -1)
        return gone

    def clear(self) -> None:
        """Remove every entry and every part of one, those that others are writing included; they write again."""
        with self._changing:
            for found in scan(self.path):
                self.remove(found)
            self.sweep()

    def sweep(self, reserve: int = 0) -> None:
        """Look at the whole folder; remove what is too old, then the least recently used until `reserve` bytes fit.

        A full cache is emptied a little further than that, so that not every write needs a look at the folder.
        """
        with self._changing:
            now = self._clock()
            found = sorted(scan(self.path))
            for item in found:
                if self._is_stale(item, now):
                    self._expire(item)
            kept = [item for item in found if not self._is_stale(item, now)]
            entries = [item for item in kept if not item.temporary]
            count, total = len(entries), sum(item.size for item in kept)
            ceiling = self.capacity - reserve
            low = ceiling - self.capacity // SLACK
            for item in entries if total > ceiling else ():
                if total <= ceiling and total - item.size < low:
                    break
                removed = self.remove(item)
                total -= item.size
                count -= 1
                with self._counting:
                    self._usage.evictions += removed
            self._unseen = 0
            self._swept_at = now
            with self._counting:
                self._usage.bytes, self._usage.entries = total, count

    def _make_room(self, size: int) -> bool:
        """Room is made before a write, never after: alone in its folder, a store is at no time above its ceiling."""
        if size > self.capacity:
            return False
        full = self.usage().bytes + size > self.capacity
        blind = self._unseen + size > self.capacity // SLACK
        if full or blind or self._clock() - self._swept_at >= self._rescan_s:
            self.sweep(size)
        return self.usage().bytes + size <= self.capacity

    def _is_stale(self, item: Found, now: float) -> bool:
        if item.temporary:
            return now - item.written > ABANDONED_S
        return self._ttl_s is not None and now - item.written >= self._ttl_s

    def _expire(self, item: Found) -> None:
        if self.remove(item) and not item.temporary:
            with self._counting:
                self._usage.expired += 1

    def _account(self, size: int, entries: int) -> None:
        with self._counting:
            self._usage.bytes = max(0, self._usage.bytes + size)
            self._usage.entries = max(0, self._usage.entries + entries)
