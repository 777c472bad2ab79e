"""Encoder outputs on disk: they survive a restart, and several processes may share one folder.

A key names its content: it must hold whatever decides the value (picture, processor settings, the encoder's weights,
the tenant's salt), and two values of one key are interchangeable. No trouble with the disk reaches a caller: a file
that cannot be trusted is a miss, and a folder that cannot be used turns the store into one that always misses.
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
from fovea.engine.cache.disk_files import Found, NotOurs
from fovea.engine.cache.disk_folder import DiskFolder
from fovea.engine.cache.write_queue import WriteQueue

log = logging.getLogger("fovea.engine")

# These pass: they cost the write or the look at hand, not the store.
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ESTALE}


@dataclass(frozen=True, slots=True)
class DiskStats:
    """What happened in this process; `bytes` and `entries` are the folder's, as far as this process knows."""

    hits: int
    misses: int
    writes: int
    dropped: int  # writes given up: queue full, entry too large, store off or closed, disk in trouble
    evictions: int  # removed to make room
    expired: int  # removed for their age
    corrupt: int
    bytes: int
    entries: int
    queued_bytes: int  # waiting in memory to be written
    off: str | None  # why the store has given up on its folder


class DatedArrays(NamedTuple):
    """An entry, and when it was written, in seconds of the store's clock."""

    arrays: Arrays
    written: float


class DiskStore:
    """At most `capacity_bytes` of entries in `folder`, least recently used first out, none older than `ttl_s` seconds.

    The arrays given to `put` must not change until they are written; those of `read` are read in the calling thread and
    held against their checksum (a second per gigabyte, without holding the interpreter's lock). At most `queue_bytes`
    wait in memory to be written. Whatever other processes do to the folder
    is noticed after `rescan_s` seconds at the latest.
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
        """The entry with the time at which it was written, marked as used; None if there is none."""
        found = None
        if self._off is None:
            waiting = self._queue.pending(key)
            found = self._read(key) if waiting is None else DatedArrays(waiting, self._clock())
        self._count("misses" if found is None else "hits")
        return found

    def put(self, key: str, arrays: Arrays) -> None:
        """Hand an entry to the writing thread; dropped and counted when its queue is full."""
        wanted = self._off is None and arrays.nbytes <= self._folder.capacity
        if not wanted or not self._queue.submit(key, arrays):
            self._count("dropped")

    def __contains__(self, key: str) -> bool:
        """Whether there is an entry, without opening it: `read` may still find it damaged."""
        if self._off is not None:
            return False
        return self._queue.pending(key) is not None or self._find(key) is not None

    def drop(self, key: str) -> None:
        self._queue.cancel(key)
        found = self._find(key)
        if found is not None:
            self._attempt(lambda: self._folder.remove(found))

    def clear(self) -> None:
        """Remove every entry. A store that was off looks at its folder afresh."""
        self._queue.cancel_all()
        with self._state:
            self._off = None
            self._warned.clear()
        self._attempt(self._folder.open)
        if self._off is None:
            self._attempt(self._folder.clear)

    def sweep(self) -> None:
        """Look at the whole folder, remove what is too old and what is too much; the writing thread does it at times."""
        if self._off is None:
            self._attempt(self._folder.sweep)

    def stats(self) -> DiskStats:
        usage, queued = self._folder.usage(), self._queue.bytes
        with self._state:
            return DiskStats(
                hits=self._counts["hits"],
                misses=self._counts["misses"],
                writes=self._counts["writes"],
                dropped=self._counts["dropped"],
                evictions=usage.evictions,
                expired=usage.expired,
                corrupt=self._counts["corrupt"],
                bytes=usage.bytes,
                entries=usage.entries,
                queued_bytes=queued,
                off=self._off,
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what was put is on disk. False: it was not within `timeout` seconds."""
        return self._queue.flush(timeout)

    def close(self, timeout: float | None = 10.0) -> None:
        """Write what waits for up to `timeout` seconds, give up the rest. Reading still works, putting does not."""
        self._count("dropped", self._queue.close(timeout))

    def _find(self, key: str) -> Found | None:
        try:
            return self._folder.find(key)
        except NotOurs as error:
            self._warn_once(error.path, f"{error}; left alone")
        except OSError as error:
            self._trouble(error)
        return None

    def _read(self, key: str) -> DatedArrays | None:
        found = self._find(key)
        if found is None:
            if not self._folder.path.is_dir():
                self._trouble(FileNotFoundError("it is gone"))
            return None
        try:
            return DatedArrays(decode(self._folder.read(found), key), found.written)
        except FileNotFoundError:
            return None  # another process has evicted it between the two looks
        except BadFile as error:
            self._count("corrupt")
            self._remove_bad(found, error)
        except OSError as error:
            self._warn_once(found.path, f"{error}; left alone")
        return None

    def _remove_bad(self, found: Found, why: BadFile) -> None:
        try:
            self._folder.remove(found)
        except OSError as error:
            self._warn_once(found.path, f"{why}; it cannot be removed ({error})")
        else:
            log.warning("disk cache: %s is not used: %s; removed", found.path, why)

    def _store(self, key: str, arrays: Arrays) -> None:
        """The writing thread's part of `put`."""
        stored = self._off is None and self._write(key, encode(key, arrays))
        self._count("writes" if stored else "dropped")

    def _write(self, key: str, pieces: list[memoryview]) -> bool:
        for _ in range(2):
            try:
                return self._folder.write(key, pieces)
            except FileNotFoundError as error:
                # Someone has emptied the folder under us: then the next attempt works. Or it is gone.
                if not self._folder.path.is_dir():
                    self._trouble(error)
                    return False
            except NotOurs as error:
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
        """Turn the store off, with one warning, unless the trouble is of the kind that passes."""
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
