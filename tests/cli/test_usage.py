"""fovea usage: tables, JSON and CSV of a usage file that a gateway may be writing."""

from __future__ import annotations

import csv
import io
import sqlite3
from pathlib import Path

import pytest

from fovea.gateway.usage.log import UsageLog, UsageSettings, UsageStore
from tests.cli.support import Caller
from tests.gateway.usage.support import NOON, record

DAY = 86_400
PERIOD = ("--since", "2026-09-01", "--until", "2026-09-30")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "usage.db"
    monkeypatch.setenv("FOVEA_USAGE_FILE", str(path))
    return path


@pytest.fixture
def log(file: Path) -> UsageLog:
    log = UsageLog(UsageStore(file, "EUR"), UsageSettings(usage_write_s=0.01, usage_days=0))
    for number in range(4):
        log.add(record("alice", at_s=NOON + number * DAY, cost=1_250_000))
    log.add(record("bob", "m2", error=True, cost=0))
    assert log.flush()
    return log


def test_a_table_while_the_gateway_writes(
    log: UsageLog, fovea: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns it has two parts, each with the names."""
    narrow = fovea("usage", *PERIOD).out.splitlines()
    assert max(map(len, narrow)) <= 80
    assert [line.split()[0] for line in narrow[1:] if line] == ["tenant", "alice", "bob", "all"] * 2
    monkeypatch.setenv("COLUMNS", "120")
    outcome = fovea("usage", *PERIOD)
    log.close()
    assert outcome.code == 0
    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert "usage from 2026-09-01 00:00 to 2026-10-01 00:00 (UTC), in EUR" in lines
    assert "alice 4 0 4 400 300 40 80 5.00 0.50 1.250000 0.625000" in lines
    assert "bob 1 1 1 100 75 10 20 0.00 0.00 0.000000 0.000000" in lines
    assert "all 5 1 5 500 375 50 100 5.00 0.50 1.000000 0.500000" in lines


def test_json_by_day_and_model(log: UsageLog, fovea: Caller) -> None:
    log.close()
    values = fovea("usage", *PERIOD, "--by", "day,model", "--json").json
    assert (values["currency"], values["by"]) == ("EUR", ["day", "model"])
    assert [(row["day"], row["model"], row["requests"]) for row in values["rows"]] == [
        ("2026-09-21", "m", 1),
        ("2026-09-21", "m2", 1),
        ("2026-09-22", "m", 1),
        ("2026-09-23", "m", 1),
        ("2026-09-24", "m", 1),
    ]
    assert values["total"]["cost"] == 5.0
    assert values["total"]["cost_per_image"] == 0.5


def test_csv(log: UsageLog, fovea: Caller) -> None:
    log.close()
    rows = list(csv.DictReader(io.StringIO(fovea("usage", *PERIOD, "--csv", "--by", "tenant").out)))
    assert [(row["tenant"], row["cost"], row["cost_per_request"], row["currency"]) for row in rows] == [
        ("alice", "5.000000", "1.250000", "EUR"),
        ("bob", "0.000000", "0.000000", "EUR"),
    ]


@pytest.mark.parametrize(
    ("period", "requests"),
    [
        (("--since", "2026-09-22"), 3),
        (("--since", "2026-09-21T12", "--until", "2026-09-21T12"), 2),
        (("--since", "2026-09-21T13", "--until", "2026-09-23"), 2),
        (("--since", "99999d"), 5),
        (("--since", "2026-09-25"), 0),
    ],
)
def test_periods(log: UsageLog, fovea: Caller, period: tuple[str, ...], requests: int) -> None:
    log.close()
    until = () if "--until" in period else ("--until", "2026-12-31")
    assert fovea("usage", *period, *until, "--json").json["total"]["requests"] == requests


def test_no_usage(log: UsageLog, fovea: Caller) -> None:
    log.close()
    outcome = fovea("usage", "--since", "2020-01-01", "--until", "2020-01-02")
    assert outcome.out == "no usage from 2020-01-01 00:00 to 2020-01-03 00:00 (UTC), in EUR\n"


def test_names_cannot_control_the_terminal(log: UsageLog, fovea: Caller) -> None:
    log.add(record("[red]x\x1b[2J"))
    log.close()
    out = fovea("usage", *PERIOD).out
    assert "[red]x?[2J" in out
    assert "\x1b" not in out


def test_a_file_beside_which_nothing_can_be_written(log: UsageLog, fovea: Caller, file: Path) -> None:
    log.close()
    Path(f"{file}-shm").symlink_to("/nowhere/file")  # unlike the mode of the folder, this also stops root
    assert fovea("usage", *PERIOD, "--json").json["total"]["requests"] == 5
    Path(f"{file}-wal").write_bytes(b"not empty")
    assert "cannot be read: unable to open database file" in fovea("usage", *PERIOD).error_line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--by", "tenants"), "--by has 'tenants'; accepted: tenant, model, backend, served_from, day, hour"),
        (("--by", "day,day"), "--by has 'day'; accepted"),
        (("--since", "yesterday"), "--since is 'yesterday'; accepted: a day, as 2027-01-31"),
        (("--until", "2026-13-01"), "--until is '2026-13-01'; accepted"),
        (("--since", "2026-09-02", "--until", "2026-09-01"), "--until is before --since"),
        (("--file", "none.db"), "usage file none.db does not exist"),
    ],
)
def test_mistakes_in_plain_words(log: UsageLog, fovea: Caller, words: tuple[str, ...], message: str) -> None:
    log.close()
    outcome = fovea("usage", *words)
    assert outcome.code == 2
    assert message in outcome.error_line


def test_files_that_are_no_usage_files(tmp_path: Path, fovea: Caller) -> None:
    text, other = tmp_path / "text", tmp_path / "other.db"
    text.write_text("hello, this is text " * 100)
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE mine (a)")
    connection.close()
    assert "cannot be read: file is not a database" in fovea("usage", "--file", text).error_line
    assert "is not a usage file of this version" in fovea("usage", "--file", other).error_line
