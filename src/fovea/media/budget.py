"""Bytes of encoded images and videos that requests hold, under one ceiling for all requests."""

from __future__ import annotations

import threading
import weakref

from fovea.core.errors import Overloaded

LARGE = 1 / 32
"""A file is large if it takes more than this share of the ceiling."""
FOR_LARGE = 3 / 4
"""Share of the ceiling that large files may fill. The rest stays for small ones."""


class MediaBudget:
    """Counts the bytes of files for as long as an object that holds them exists. Thread-safe.

    capacity: ceiling in bytes.
    held: bytes that are held now.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self._lock = threading.RLock()  # garbage collection may release a file within `hold`

    def hold(self, holder: object, size: int) -> None:
        """Count a file of `size` bytes until `holder` is garbage.

        Raises Overloaded if there is no room. Large files may fill only a part of the ceiling, FOR_LARGE.
        """
        most = self.capacity * (FOR_LARGE if size > self.capacity * LARGE else 1)
        with self._lock:
            if self.held and self.held + size > most:
                raise Overloaded(
                    f"a file of {size} bytes has no room: images and videos of requests in flight take "
                    f"{self.held} bytes; accepted: at most {int(most)} together",
                    retry_after=1.0,
                    code="media_full",
                )
            self.held += size
        weakref.finalize(holder, self._release, size)

    def _release(self, size: int) -> None:
        with self._lock:
            self.held -= size
