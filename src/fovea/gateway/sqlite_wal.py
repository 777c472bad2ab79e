"""The step that puts an SQLite file into WAL mode, when several processes may open the new file at once.

SQLite's busy timeout does not apply to this step: a process that switches the mode while another one does
the same gets "database is locked" at once.
"""

from __future__ import annotations

import sqlite3
import time

_PAUSE_S = 0.005


def use_wal(connection: sqlite3.Connection, timeout_s: float) -> str:
    """Put the file of a connection into WAL mode, where a reader never waits for a writer.

    timeout_s: how long to try again while other processes hold the file.

    Returns the mode that the file has now: "wal", or another one if its file system has no WAL.
    Raises sqlite3.OperationalError if the file stays locked.
    """
    ends = time.monotonic() + timeout_s
    while True:
        try:
            return str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not busy or time.monotonic() >= ends:
                raise
        time.sleep(_PAUSE_S)
