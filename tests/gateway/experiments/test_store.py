"""Sums of several processes are added exactly, and a killed process loses only what it had not written."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fovea.core.errors import ConfigError
from fovea.gateway.experiments.statistics import Statistics
from fovea.gateway.experiments.store import State, Store
from tests.gateway.experiments.support import NEW, NEXT, OLD, a_config, an_experiment, an_outcome
from tests.gateway.experiments.writer import BATCH

WRITER = (sys.executable, "-m", "tests.gateway.experiments.writer")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return a_config(tmp_path).path


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = Store(path)
    opened.register(an_experiment(), 1000.0)
    yield opened
    opened.close()


def expected(ranges: list[range]) -> dict[str, Statistics]:
    sums = {"old": Statistics(), "new": Statistics()}
    for numbers in ranges:
        for position, number in enumerate(numbers):
            sums["new" if position % 3 else "old"].add(an_outcome(number), 100_000)
    return sums


def amounts(sums: dict[str, Statistics]) -> dict[str, dict[tuple[str, int], float]]:
    return {name: {key: value for key, value in each.amounts.items() if value} for name, each in sums.items()}


def test_two_processes_write_to_one_file_and_the_sums_are_exact(store: Store, path: Path) -> None:
    processes = [
        subprocess.Popen([*WRITER, str(path.parent), str(first), "900"], cwd=ROOT, stdout=subprocess.DEVNULL)
        for first in (0, 5000)
    ]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert amounts(store.sums("v2")) == amounts(expected([range(900), range(5000, 5900)]))


def test_a_killed_process_loses_only_what_it_had_not_written(store: Store, path: Path) -> None:
    process = subprocess.Popen(
        [*WRITER, str(path.parent), "0", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    written = 0
    while written < 300:
        written = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    rest = process.communicate()[0].split()
    written = int(rest[-1]) if rest else written
    sums = store.sums("v2")
    counted = sum(each.requests for each in sums.values())
    assert counted in (written, written + BATCH), "a written batch is there once, and the next wholly or not"
    assert amounts(sums) == amounts(expected([range(counted)]))
    with sqlite3.connect(path) as base:
        assert base.execute("SELECT count(*) FROM request").fetchone() == (counted,)
    base.close()
    assert store.rate(f"r-{counted - 1}", 5)
    assert not store.rate(f"r-{counted}", 5)


def test_states(store: Store) -> None:
    assert store.states()["v2"] == State(reason="started", changed=1000.0, identity=an_experiment().identity)
    store.promote("v2", "new", "faster", 2000.0)
    state = store.states()["v2"]
    assert (state.state, state.promoted, state.reason, state.changed) == ("promoted", "new", "faster", 2000.0)
    assert not store.roll_back("v2", ["new"], "late", 2001.0), "it is decided already"
    store.end("v2", "slow", 3000.0)
    assert (store.states()["v2"].state, store.states()["v2"].promoted) == ("rolled_back", "")


def test_a_rollback_removes_one_variant_and_the_last_one_ends_the_experiment(tmp_path: Path) -> None:
    store = Store(a_config(tmp_path).path)
    store.register(an_experiment(variants=(OLD, NEW, NEXT)), 0.0)
    assert store.roll_back("v2", ["new"], "errors", 1.0)
    assert not store.roll_back("v2", ["new"], "errors", 2.0)
    assert (store.states()["v2"].state, store.states()["v2"].removed) == ("active", ("new",))
    assert store.roll_back("v2", ["next"], "slow", 3.0)
    assert (store.states()["v2"].state, store.states()["v2"].removed) == ("rolled_back", ("new", "next"))
    assert not store.roll_back("unknown", ["new"], "slow", 3.0)
    store.close()


def test_only_one_process_checks_at_a_time(store: Store, path: Path) -> None:
    other = Store(path)
    assert store.claim_check("v2", 100.0, 5.0)
    assert not other.claim_check("v2", 104.0, 5.0)
    assert other.claim_check("v2", 105.0, 5.0)
    other.close()


def test_changed_variants_need_a_reset(store: Store) -> None:
    changed = an_experiment(variants=(OLD, NEXT))
    with pytest.raises(ConfigError, match=r"its variants, .* changed .*fovea experiment decide v2 --reset"):
        store.register(changed, 0.0)
    store.reset("v2", "again", 0.0)
    store.register(changed, 0.0)
    state = store.states()["v2"]
    assert (state.state, state.identity) == ("active", changed.identity)
    assert store.definitions() == (changed,)
    with pytest.raises(ConfigError):
        store.register(an_experiment(), 0.0)


def test_other_criteria_need_no_reset(store: Store) -> None:
    softer = an_experiment(sticky_by="request")
    store.register(softer, 0.0)
    assert store.definitions() == (softer,)


def test_a_file_that_is_no_state_file(tmp_path: Path) -> None:
    config = a_config(tmp_path)
    with pytest.raises(ConfigError, match="there is no state file .*; a gateway with experiments writes it"):
        Store(config.path, create=False)
    config.path.write_text("not a database, but a text that is long enough to be read as one" * 20)
    with pytest.raises(ConfigError, match=r"state file .* cannot be used: file is not a database"):
        Store(config.path)


def test_a_file_of_another_version(store: Store, path: Path) -> None:
    base = sqlite3.connect(path)
    base.execute("PRAGMA user_version = 9")
    base.close()
    with pytest.raises(ConfigError, match="has version 9; accepted: 1"):
        Store(path)


def test_a_folder_that_others_can_write_to(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write to"):
        Store(a_config(folder).path)
