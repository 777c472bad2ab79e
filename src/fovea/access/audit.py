"""The audit log: a line for every request that was refused with 401 or 403, with a bound on their number."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

log = logging.getLogger("fovea.audit")
LINES = 20
"""Most lines per window. A flood of requests fills no disk."""
WINDOW_S = 10.0
LONGEST_PATH = 200


class Audit:
    """Writes at most LINES lines per window, and then how many more there were.

    clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._lines = 0
        self._skipped = 0

    def refused(
        self, status: int, reason: str, address: str, path: str, fingerprint: str, request_id: str
    ) -> None:
        """Write a line about a refused request, or count it if the window has enough lines.

        fingerprint: the first digits of the hash of the key that was sent, "-" if there was none.
        """
        self.flush()
        if self._lines >= LINES:
            self._skipped += 1
            return
        self._lines += 1
        values = {
            "status": status, "reason": reason, "address": address, "path": path[:LONGEST_PATH],
            "key": fingerprint, "id": request_id,
        }  # fmt: skip
        log.warning("refused %s", json.dumps(values))  # JSON of ASCII: no control character reaches the log

    def flush(self, *, final: bool = False) -> None:
        """Begin a new window if this one is over, and write how many lines it left out.

        final: the window ends now.
        """
        elapsed = self._clock() - self._began
        if elapsed < WINDOW_S and not final:
            return
        if self._skipped:
            log.warning("refused: and %s more in %.0f s", f"{self._skipped:,}", elapsed)
        self._began, self._lines, self._skipped = self._clock(), 0, 0
