"""Bytes of encoded images and videos that requests hold, under one ceiling for all requests."""

from __future__ import annotations

import threading
import weakref
from collections import Counter

from fovea.core.errors import Overloaded

LARGE = 1 / 32
"""A file is large if it takes more than this share of the ceiling."""
FOR_LARGE = 3 / 4
"""Share of the ceiling that large files may fill. The rest stays for small ones."""
FOR_OWNER = 1 / 2
"""Share of the ceiling that the files of one client may fill."""


class MediaBudget:
    """Counts the bytes of files until they are released. Thread-safe.

    capacity: ceiling in bytes.
    held: bytes that are held now.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self._by_owner: Counter[str] = Counter()
        self._releases: dict[int, weakref.finalize[[int, int, str], object]] = {}
        self._lock = threading.RLock()  # garbage collection may release a file within `hold`

    def hold(self, holder: object, size: int, owner: str = "") -> None:
        """Count a file of `size` bytes until `holder` is released, or is garbage.

        owner: the client who sent it; "" if clients are not told apart.
        Raises Overloaded if there is no room. Large files find none earlier than small ones.
        """
        most = self.capacity * (FOR_LARGE if size > self.capacity * LARGE else 1)
        with self._lock:
            if self.held and self.held + size > most:
                raise self._refusal(size, "images and videos of requests in flight take", self.held, most)
            own = self._by_owner[owner]
            if owner and own and own + size > self.capacity * FOR_OWNER:
                most = self.capacity * FOR_OWNER
                raise self._refusal(size, f"images and videos of {owner!r} in flight take", own, most)
            self.held += size
            self._by_owner[owner] += size
            self._releases[id(holder)] = weakref.finalize(holder, self._release, id(holder), size, owner)

    def release(self, holder: object) -> None:
        """Count the file of `holder` no longer. Releasing twice, or what was never held, is no error."""
        with self._lock:
            release = self._releases.get(id(holder))
        if release is not None:
            release()

    def _release(self, key: int, size: int, owner: str) -> None:
        with self._lock:
            del self._releases[key]
            self.held -= size
            self._by_owner[owner] -= size
            if not self._by_owner[owner]:
                del self._by_owner[owner]

    @staticmethod
    def _refusal(size: int, what: str, held: int, most: float) -> Overloaded:
        return Overloaded(
            f"a file of {size} bytes has no room: {what} {held} bytes; "
            f"accepted: at most {int(most)} together",
            retry_after=1.0,
            code="media_full",
            scope="request",
        )
