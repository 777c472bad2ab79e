"""The usage log: sums reach the file, from several processes, through slow disks and after kill -9."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fovea.core.errors import ConfigError
from fovea.gateway.usage import log as log_module
from fovea.gateway.usage import log as store_module
from fovea.gateway.usage.log import OTHER, Key, Row, UsageLog, UsageSettings, UsageStore, read_usage
from tests.gateway.usage.support import NOON, record

FAST = UsageSettings(usage_write_s=0.01, usage_days=0)
ALWAYS = (0, 10**7)


class SlowDisk:
    """A store that fails, or waits, until it is repaired."""

    def __init__(self) -> None:
        self.works = threading.Event()
        self.entered = threading.Event()
        self.fails = False
        self.rows: dict[Key, list[float]] = {}

    def write(self, rows: Iterable[tuple[Key, Sequence[float]]]) -> None:
        self.entered.set()
        if self.fails:
            raise sqlite3.OperationalError("disk I/O error")
        assert self.works.wait(10)
        for key, sums in rows:
            old = self.rows.get(key, [0.0] * len(sums))
            self.rows[key] = [a + b for a, b in zip(old, sums, strict=True)]

    def forget(self, before_hour: int) -> None:
        raise AssertionError("nothing is to be removed")

    def close(self) -> None:
        pass


def rows(path: Path, *by: str) -> tuple[Row, ...]:
    return read_usage(path, by, *ALWAYS).rows


def test_sums_by_hour_tenant_model_backend_and_origin(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    log = UsageLog(UsageStore(path, "EUR"), FAST)
    for _ in range(3):
        log.add(record())
    assert log.flush()
    log.add(record(error=True, cost=0))
    log.add(record(at_s=NOON + 3600, served_from="fallback", backend="b2"))
    log.add(record("bob", served_from="response_cache", backend=""))
    log.close()
    found = rows(path, "hour", "tenant", "model", "backend", "served_from")
    assert [row.group[1:] for row in found] == [
        ("alice", "m", "b1", "backend"),
        ("bob", "m", "", "response_cache"),
        ("alice", "m", "b2", "fallback"),
    ]
    first = found[0]
    assert first[1:] == (4, 1, 0, 4, 400, 300, 40, 80, 3000, 300, 1500, 1.0)
    assert (first.cost_per_request, first.cost_per_image) == (750, 375)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_usage(path, ["tenant"], 0, NOON // 3600 + 1).total.requests == 5


def test_counts_that_cannot_be_true_are_not_summed(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    log = UsageLog(UsageStore(path, "EUR"), FAST)
    log.add(record(tokens=10**30))
    log.add(record(cost=10**30))
    log.close()
    (row,) = rows(path, "tenant")
    assert (row.requests, row.estimated, row.images, row.prompt_tokens, row.cost) == (2, 2, 2, 0, 0)


def test_a_slow_disk_costs_no_record_and_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "QUEUE", 8)
    disk = SlowDisk()
    log = UsageLog(disk, UsageSettings(usage_write_s=0.01, usage_days=0, usage_rows=10))
    log.add(record())
    assert disk.entered.wait(10)
    for number in range(1000):
        log.add(record(f"t{number}"))
    assert log.rows <= 11
    disk.works.set()
    assert log.flush()
    log.close()
    assert sum(sums[0] for sums in disk.rows.values()) == 1001
    assert any(key.tenant == OTHER for key in disk.rows)


def test_a_failing_disk_is_named_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    disk = SlowDisk()
    disk.fails = True
    log = UsageLog(disk, FAST, clock=lambda: 0.0)
    for _ in range(5):
        log.add(record())
        assert not log.flush()
    assert log.rows == 1
    disk.fails = False
    disk.works.set()
    assert log.flush()
    assert [sums[0] for sums in disk.rows.values()] == [5]
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert warnings == ["usage cannot be written; it stays in memory and is tried again: disk I/O error"]
    disk.fails = True
    log.add(record())
    log.close()
    assert "the usage of 1 requests could not be written and is lost" in caplog.text


def test_a_file_that_another_process_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BUSY_S", 0.01)
    path = tmp_path / "usage.db"
    log = UsageLog(UsageStore(path, "EUR"), FAST)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    log.add(record())
    assert not log.flush()
    other.execute("ROLLBACK")
    other.close()
    assert log.flush()
    log.close()
    assert rows(path, "tenant")[0].requests == 1


def test_old_rows_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    log = UsageLog(UsageStore(path, "EUR"), UsageSettings(usage_days=7), clock=lambda: NOON)
    log.add(record("old", at_s=NOON - 7 * 86_400 - 3600))
    log.add(record("new", at_s=NOON - 7 * 86_400))
    log.close()
    assert [row.group for row in rows(path, "tenant")] == [("new",)]


def test_a_removed_file_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    log = UsageLog(UsageStore(path, "EUR"), FAST)
    log.add(record())
    assert log.flush()
    for each in tmp_path.iterdir():
        each.unlink()
    log.add(record("bob"))
    assert log.flush()
    log.close()
    assert [row.group for row in rows(path, "tenant")] == [("bob",)]


WORKER = """
import sys
from pathlib import Path
from fovea.gateway.usage.log import UsageLog, UsageSettings
from fovea.gateway.usage.log import UsageStore
from tests.gateway.usage.support import record
log = UsageLog(UsageStore(Path(sys.argv[1]), "EUR"), UsageSettings(usage_write_s=0.01, usage_days=0))
for number in range(int(sys.argv[2])):
    for _ in range(10):
        log.add(record())
    if number % 20 == 19:
        assert log.flush()
        print((number + 1) * 10, flush=True)
log.close()
"""


@pytest.fixture
def worker(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def start(rounds: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path / "usage.db"), str(rounds)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    return start


def test_several_processes_write_one_file(tmp_path: Path, worker: Callable[..., Any]) -> None:
    workers = [worker(60) for _ in range(3)]
    for each in workers:
        each.communicate()
    assert [each.returncode for each in workers] == [0, 0, 0]
    (row,) = rows(tmp_path / "usage.db", "tenant")
    assert (row.requests, row.cost) == (1800, 1_800_000)


def test_what_was_written_survives_kill(tmp_path: Path, worker: Callable[..., Any]) -> None:
    process = worker(10**9)
    written = 0
    for _ in range(5):
        written = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    rest = process.communicate()[0].split("\n")
    written = max([written, *(int(line) for line in rest[:-1])])
    (row,) = rows(tmp_path / "usage.db", "tenant")
    assert written <= row.requests <= written + 400
    assert row.cost == row.requests * 1000
    with sqlite3.connect(tmp_path / "usage.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: path.write_text("hello, this is text" * 100), "file is not a database"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: other_database(path), "it is a database of another program"),
        (lambda path: UsageStore(path, "USD").close(), "its costs are in USD, and the prices are in EUR"),
    ],
)
def test_files_that_are_no_usage_files(
    tmp_path: Path, prepare: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "usage.db"
    prepare(path)
    with pytest.raises(ConfigError, match=message):
        UsageStore(path, "EUR")


def other_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE mine (a)")
    connection.close()
