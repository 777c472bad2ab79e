"""The connector through a folder that the processes share: the disk store of encoder outputs.

It needs nothing but a file system, also a network's, and it is the slowest. The store evicts what was not
used for longest, so a release does nothing. A file system that hangs can hold a fetch for longer than its
timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from fovea.core.errors import ConfigError
from fovea.engine.cache.disk import DiskStore
from fovea.engine.cache.disk_files import Array, Arrays
from fovea.engine.transfer.connector import (
    Buffer,
    Offer,
    TransferFailed,
    copy_checked,
    copy_pieces,
    flat_views,
    transfer_counts,
)

WRITE_S = 1.0
"""Most seconds that an offer waits until its value is written."""


class FolderConnector:
    """Values as files of a folder."""

    kind = "folder"

    def __init__(self, folder: Path, capacity_bytes: int, *, ttl_s: float | None = None) -> None:
        """Raises ConfigError if the folder cannot be used.

        folder: all processes that exchange values have the same, under the same path.
        capacity_bytes: most bytes of the folder.
        ttl_s: values expire after so many seconds; None: only the least recently used are evicted.
        """
        self._store = DiskStore(folder, capacity_bytes, ttl_s=ttl_s, queue_bytes=capacity_bytes)
        reason = self._store.stats().off
        if reason is not None:
            self._store.close()
            raise ConfigError(f"the transfer folder {folder} cannot be used: {reason}")
        self._place = str(folder.resolve())
        self._counts = transfer_counts()
        self._writing = threading.Lock()  # `flush` waits for all writes: with one at a time, for this one
        self._is_closed = False

    def has(self, name: str) -> bool:
        return not self._is_closed and _key(name) in self._store

    def offer(self, name: str, pieces: Sequence[Buffer]) -> Offer | None:
        """Write a value, and offer it once it can be read. It waits for the disk."""
        views = flat_views(pieces)
        data = bytearray(sum(len(view) for view in views))
        checksum = copy_pieces(views, memoryview(data))
        if not self._write(_key(name), data):
            self._counts.add(refusals=1)
            return None
        self._counts.add(offers=1, offered_bytes=len(data))
        return Offer(self.kind, self._place, name, len(data), checksum)

    def fetch(self, offer: Offer, timeout_s: float) -> bytearray:
        return self._counts.count_fetch(lambda: self._read(offer))

    def release(self, offer: Offer) -> None:
        self._counts.add(releases=1)

    def close(self) -> None:
        self._is_closed = True
        self._store.close()

    def stats(self) -> dict[str, float]:
        """`transfer_counts`, and the use of the folder."""
        disk = self._store.stats()
        return self._counts.values() | {
            "folder_bytes": float(disk.bytes),
            "entries": float(disk.entries),
            "evictions": float(disk.evictions),
        }

    def _write(self, key: str, data: bytearray) -> bool:
        if self._is_closed:
            return False
        with self._writing:
            self._store.put(key, Arrays((Array("value", "uint8", (len(data),), data),)))
            return self._store.flush(WRITE_S) and key in self._store

    def _read(self, offer: Offer) -> bytearray:
        if self._is_closed:
            raise TransferFailed("the connector is closed")
        if offer.connector != self.kind:
            raise TransferFailed(f"it is an offer of {offer.connector}, not of {self.kind}")
        if offer.place != self._place:
            raise TransferFailed("the offer's place is not this connector's folder")
        entry = self._store.read(_key(offer.name))
        if entry is None:
            raise TransferFailed("the folder does not have the value, or its file is damaged")
        if len(entry.arrays.items) != 1 or entry.arrays.nbytes != offer.size:
            raise TransferFailed(f"the value has {entry.arrays.nbytes} bytes, not {offer.size}")
        return copy_checked(memoryview(entry.arrays.items[0].data), offer.checksum)


def _key(name: str) -> str:
    """The key in the store. A store of encoder outputs in the same folder has other keys."""
    return f"transfer:{name}"
