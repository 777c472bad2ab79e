"""The audit log: lines about refused requests and changes of keys, and, if it is wanted, a line for every
answered request.

A line about an answered request says who used what, and never what was in it. It holds numbers, names that
the operator chose, and digests. It holds no text, address, query string or byte of a request or answer, and
no key. Some fields come from the client, such as the name of a model and the request id. They are written
only if they look like names; otherwise a mark replaces them. Images are named by the first 16 hex digits of
the digest of their bytes, so that the same image can be found again in the log, but not be seen.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from fovea.access.log import AccessLog

log = logging.getLogger("fovea.audit")
LINES = 20
"""Most lines about refused requests per window. A flood of them fills no disk."""
WINDOW_S = 10.0
LONGEST_PATH = 200
MOST_IMAGES = 64
"""Most images of an answered request that a line describes. It always has their number."""
IDENTITY_DIGITS = 16
NO_NAME = "(not a name)"
"""Stands for a text of the client that does not look like a name."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
_FINGERPRINT = re.compile(r"[0-9a-f]{8}")
_DIGEST = re.compile(r"[0-9a-f]{16,}")


class Audit:
    """Writes the lines. A thread writes those of answered requests, so that a slow disk delays no request.

    clock: returns the time in seconds.
    target: place of the lines of answered requests: the path of a file; "true": the logger `fovea.access`;
        "false": nowhere. Lines about refused requests go to the logger `fovea.audit`, those about changes to
        both.

    Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, target: str = "false") -> None:
        self._answered = AccessLog(target)
        self._clock = clock
        self._began = clock()
        self._lines = 0
        self._skipped = 0

    @property
    def on(self) -> bool:
        """Whether answered requests are written."""
        return self._answered.on

    def answered(self, at_s: float, fields: Mapping[str, Any]) -> None:
        """Write the line of an answered request.

        at_s: time of its end, in seconds of the epoch.
        fields: numbers and texts by name. A text is written if it looks like a name. `key` is the fingerprint
            of a key, `route` a text of the program's own, `image_list` has (width, height, hex digits of the
            digest).
        """
        self._answered.write(
            {"time": _time(at_s), **{name: _harmless(name, value) for name, value in fields.items()}}
        )

    def changed(self, at_s: float, fields: Mapping[str, Any]) -> None:
        """Write a line about a change that an operator made, to both places.

        fields: numbers and texts by name, which hold no key: who, from which address, what. Their texts are
            escaped as JSON, so none can forge a line.
        """
        values = {"time": _time(at_s), **fields}
        self._answered.write(values)
        log.warning("changed %s", json.dumps(values))

    def close(self) -> None:
        """Write the waiting lines and close the file."""
        self._answered.close()

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


def _time(at_s: float) -> str:
    at = datetime.datetime.fromtimestamp(at_s, datetime.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _harmless(name: str, value: Any) -> Any:
    """Return a field as it may be written."""
    if name == "key":
        return value if _FINGERPRINT.fullmatch(value) else "-"
    if name == "image_list":
        return [
            [width, height, identity[:IDENTITY_DIGITS] if _DIGEST.fullmatch(identity) else ""]
            for width, height, identity in value[:MOST_IMAGES]
        ]
    return name_of(value) if isinstance(value, str) and name != "route" else value


def name_of(text: str) -> str:
    """Return a text if it looks like a name, and otherwise a mark. An empty text stays empty.

    A name has at most 128 letters, digits and ._:/@+- and is not an address.
    """
    return text if not text or (_NAME.fullmatch(text) and "://" not in text) else NO_NAME
