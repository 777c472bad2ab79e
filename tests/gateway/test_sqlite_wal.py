"""Tests of the switch of an SQLite file to WAL mode."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fovea.gateway.sqlite_wal import use_wal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new.db"


@pytest.fixture
def holder(path: Path) -> Iterator[sqlite3.Connection]:
    """Another process's connection, which holds the lock that the switch needs."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as connection:
        connection.execute("CREATE TABLE known (number)")
        connection.execute("BEGIN EXCLUSIVE")
        yield connection


def test_it_waits_for_the_process_that_switches_first(path: Path, holder: sqlite3.Connection) -> None:
    """Three gateways started on one new file: one of them ended with "database is locked", because SQLite's
    own timeout does not apply to this switch."""
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
        ended = threading.Timer(0.05, holder.execute, ("COMMIT",))
        ended.start()
        assert use_wal(connection, timeout_s=10) == "wal"
        ended.join()


def test_it_gives_up_after_its_time(path: Path, holder: sqlite3.Connection) -> None:
    with (
        closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection,
        pytest.raises(sqlite3.OperationalError, match="locked"),
    ):
        use_wal(connection, timeout_s=0.02)


def test_another_error_is_raised_at_once(path: Path) -> None:
    path.write_bytes(b"not a database, but some text that is long enough to be read as a header" * 20)
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as connection,
        pytest.raises(sqlite3.DatabaseError, match="not a database"),
    ):
        use_wal(connection, timeout_s=10)


def test_a_file_in_memory_keeps_its_own_mode() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        assert use_wal(connection, timeout_s=1) == "memory"
