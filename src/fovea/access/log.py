"""The access log: a line of JSON per request, written by a thread, so that a slow disk delays no request.

If the disk is slower than the requests, lines are left out, and a later line says how many.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from fovea.core.errors import ConfigError

NAME = "fovea.access"
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
WAITING_LINES = 10_000
"""Most lines that wait to be written."""
_OFF, _ON = ("", "false", "off", "no", "0"), ("true", "on", "yes", "1")


def request_id(header: bytes) -> str:
    """Return the id that a client sent in x-request-id, or a new one if it sent none that is harmless.

    Accepted are 1 to 128 letters, digits, dots, colons, hyphens and underscores. Any other id could forge
    lines of a log. Gateway and server share the rule, so a request has one id in the logs of both.
    """
    return header.decode("ascii") if _SANE_ID.fullmatch(header) else f"req_{secrets.token_hex(14)}"


class AccessLog:
    """Writes a line per request, if a place for the lines is set.

    target: "false": nowhere; "true": the logger `fovea.access`; otherwise the path of a file. The file gets
        mode 0600 if it is created. It is opened again after it was renamed or removed, as logrotate does.

    Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, target: str) -> None:
        self._listener: logging.handlers.QueueListener | None = None
        if target.lower() in _OFF:
            return
        self._handler = _Queued(queue.Queue(WAITING_LINES))
        sink = _Forward() if target.lower() in _ON else _open(target)
        self._listener = logging.handlers.QueueListener(self._handler.queue, sink)
        self._listener.start()

    @property
    def on(self) -> bool:
        return self._listener is not None

    def write(self, values: Mapping[str, Any]) -> None:
        """Write one line. Characters outside of ASCII and control characters are escaped."""
        if self._listener is not None:
            self._handler.handle(_record(values))

    def close(self) -> None:
        """Write the waiting lines and close the file."""
        if self._listener is not None:
            handlers = self._listener.handlers
            self._listener.stop()
            for handler in handlers:
                handler.close()
            self._listener = None


class _Queued(logging.handlers.QueueHandler):
    """Hands lines to the thread, and counts those for which there was no room."""

    def __init__(self, lines: queue.Queue[Any]) -> None:
        super().__init__(lines)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._dropped:
                self.enqueue(_record({"dropped_lines": self._dropped}))
                self._dropped = 0
            self.enqueue(record)
        except queue.Full:
            self._dropped += 1


class _Forward(logging.Handler):
    """Passes lines on to the handlers of the logger `fovea.access`, whatever its level is."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(NAME).handle(record)


class _PrivateFile(logging.handlers.WatchedFileHandler):
    """A file that only its owner may read, because it holds the addresses of clients."""

    def _open(self) -> IO[Any]:  # type: ignore[override]
        return open(
            self.baseFilename, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)
        )


def _open(path: str) -> logging.Handler:
    try:
        return _PrivateFile(Path(path).expanduser())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", param="access_log") from error


def _record(values: Mapping[str, Any]) -> logging.LogRecord:
    """Return a record whose text is JSON. A log of JSON lines (`observe.logs`) takes its fields.

    The field `event` says what the line is about; without it, it is about a request.
    """
    record = logging.LogRecord(NAME, logging.INFO, "", 0, json.dumps(values), None, None)
    record.fields, record.event = dict(values), str(values.get("event", "request"))
    return record
