"""The state file: one SQLite file that holds the sums, the decisions and the latest request ids.

Worker processes add their sums in one transaction each (`amount = amount + new`), so nothing is counted twice
or lost, whatever process is killed at whatever time: a transaction is in the file as a whole or not at all.
Readers are never blocked (write-ahead log).

Tables:
    experiment      definition, state, generation of the numbers, time of the last check
    sums            amount by experiment, variant, field and bucket
    request         experiment, variant and rating of the latest answered requests
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fovea.core.errors import ConfigError
from fovea.core.private_files import private_folder
from fovea.gateway.experiments.config import Experiment, experiment_of
from fovea.gateway.experiments.statistics import Statistics
from fovea.gateway.sqlite_wal import use_wal

ACTIVE, PROMOTED, ROLLED_BACK = "active", "promoted", "rolled_back"
VERSION = 1
BUSY_S = 10.0
_TABLES = (
    "CREATE TABLE IF NOT EXISTS experiment (name TEXT PRIMARY KEY, identity TEXT, definition TEXT, "
    "state TEXT, promoted TEXT, removed TEXT, reason TEXT, changed REAL, generation INTEGER, checked REAL)",
    "CREATE TABLE IF NOT EXISTS sums (experiment TEXT, variant TEXT, field TEXT, bucket INTEGER, "
    "amount NUMERIC, PRIMARY KEY (experiment, variant, field, bucket)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS request (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, "
    "experiment TEXT, variant TEXT, rating INTEGER)",
)
_ADD = (
    "INSERT INTO sums VALUES (?, ?, ?, ?, ?) ON CONFLICT (experiment, variant, field, bucket) "
    "DO UPDATE SET amount = amount + excluded.amount"
)


@dataclass(frozen=True, slots=True)
class State:
    """The state of one experiment.

    state: `active`, `promoted` or `rolled_back`.
    promoted: name of the promoted variant; empty if none is.
    removed: variants that were rolled back.
    reason: why the state changed last.
    changed: seconds of the epoch when it did.
    generation: changes when the numbers are deleted.
    identity: digest of the variants whose numbers these are; empty after a reset.
    """

    state: str = ACTIVE
    promoted: str = ""
    removed: tuple[str, ...] = ()
    reason: str = ""
    changed: float = 0.0
    generation: int = 0
    identity: str = ""


@dataclass(slots=True)
class Delta:
    """New sums of one variant that are not in the file yet.

    requests: ids of its requests that can be rated.
    """

    statistics: Statistics
    requests: list[str]


Key = tuple[str, str, int]
"""Experiment, variant and generation to which new sums belong."""


class Store:
    """The state file. Threads may share a store; processes open one each, after a fork."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Open the file.

        create: create the file, for this user alone, if there is none.

        Raises ConfigError if it cannot be used, or if another user could change it.
        """
        self._path = path
        self._lock = threading.Lock()
        reason = private_folder(path.parent) if create else None
        if reason is not None:
            raise ConfigError(f"state file {path}: {reason}; accepted: a folder of this user", param="folder")
        if not create and not path.is_file():
            raise ConfigError(
                f"there is no state file {path}; a gateway with experiments writes it", param="state"
            )
        try:
            self._base = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            self._prepare()
        except sqlite3.Error as error:
            raise ConfigError(f"state file {path} cannot be used: {error}", param="folder") from error

    def close(self) -> None:
        with self._lock:
            self._base.close()

    def register(self, experiment: Experiment, now: float) -> None:
        """Add an experiment, or replace the definition of a known one.

        Raises ConfigError if the numbers in the file are of other variants.
        """
        with self._transaction() as base:
            row = base.execute(
                "SELECT identity, definition FROM experiment WHERE name = ?", (experiment.name,)
            ).fetchone()
            if row is None:
                base.execute(
                    "INSERT INTO experiment VALUES (?, ?, ?, ?, '', '[]', 'started', ?, 0, 0)",
                    (experiment.name, experiment.identity, experiment.text(), ACTIVE, now),
                )
                return
            if row[0] not in (experiment.identity, ""):
                raise ConfigError(
                    f"experiment {experiment.name!r}: its model, its variants, its shadow or largest_cost "
                    f"changed since numbers were collected in {self._path}; accepted: another name, or "
                    f"`fovea experiment decide {experiment.name} --reset`, which deletes its numbers",
                    param="experiment",
                )
            if experiment_of(row[1]).identity != experiment.identity:
                self._delete_numbers(base, experiment.name)  # collected after the reset by the old variants
            base.execute(
                "UPDATE experiment SET identity = ?, definition = ? WHERE name = ?",
                (experiment.identity, experiment.text(), experiment.name),
            )

    def definitions(self) -> tuple[Experiment, ...]:
        """Return the experiments of the file, by name."""
        with self._lock:
            rows = self._base.execute("SELECT definition FROM experiment ORDER BY name").fetchall()
        return tuple(experiment_of(row[0]) for row in rows)

    def states(self) -> dict[str, State]:
        """Return the states of all experiments."""
        with self._lock:
            rows = self._base.execute(
                "SELECT name, state, promoted, removed, reason, changed, generation, identity FROM experiment"
            ).fetchall()
        return {row[0]: State(row[1], row[2], tuple(json.loads(row[3])), *row[4:]) for row in rows}

    def sums(self, experiment: str) -> dict[str, Statistics]:
        """Return the sums of all processes by variant."""
        with self._lock:
            rows = self._base.execute(
                "SELECT variant, field, bucket, amount FROM sums WHERE experiment = ?", (experiment,)
            ).fetchall()
        found: dict[str, Statistics] = {}
        for variant, field, bucket, amount in rows:
            found.setdefault(variant, Statistics()).amounts[field, bucket] = amount
        return found

    def add(self, deltas: Mapping[Key, Delta], recent: int) -> None:
        """Add sums and request ids in one transaction. Those of an earlier generation are dropped.

        recent: request ids to keep, all experiments together.
        Raises sqlite3.Error; then nothing was added.
        """
        with self._transaction() as base:
            known = dict(base.execute("SELECT name, generation FROM experiment").fetchall())
            has_requests = False
            for (experiment, variant, generation), delta in deltas.items():
                if known.get(experiment) != generation:
                    continue
                base.executemany(_ADD, ((experiment, variant, *row) for row in delta.statistics.rows()))
                base.executemany(
                    "INSERT OR IGNORE INTO request (id, experiment, variant) VALUES (?, ?, ?)",
                    ((id, experiment, variant) for id in delta.requests),
                )
                has_requests = has_requests or bool(delta.requests)
            if has_requests:
                base.execute(
                    "DELETE FROM request WHERE number <= (SELECT max(number) FROM request) - ?", (recent,)
                )

    def rate(self, request_id: str, rating: int) -> bool:
        """Rate a request. A second rating of a request replaces the first.

        Returns False if the request is not known, or not any more. Raises sqlite3.Error.
        """
        with self._transaction() as base:
            row = base.execute(
                "SELECT experiment, variant, rating FROM request WHERE id = ?", (request_id,)
            ).fetchone()
            if row is None:
                return False
            experiment, variant, old = row
            if old is not None:
                base.execute(_ADD, (experiment, variant, "rating", old, -1))
            base.execute(_ADD, (experiment, variant, "rating", rating, 1))
            base.execute("UPDATE request SET rating = ? WHERE id = ?", (rating, request_id))
            return True

    def claim_check(self, experiment: str, now: float, every_s: float) -> bool:
        """Whether this process is to check the guard rails now, because no process did for `every_s`."""
        with self._transaction() as base:
            changed = base.execute(
                "UPDATE experiment SET checked = ? WHERE name = ? AND abs(? - checked) >= ?",
                (now, experiment, now, every_s),
            )
            return changed.rowcount == 1

    def promote(self, experiment: str, variant: str, reason: str, now: float) -> None:
        """Send all requests to one variant from now on."""
        with self._transaction() as base:
            self._write_state(base, experiment, PROMOTED, variant, [], reason, now)

    def roll_back(self, experiment: str, variants: Iterable[str], reason: str, now: float) -> bool:
        """Take requests away from variants. Without a variant left, the state is `rolled_back`.

        Returns False if all of them were removed already, or if the experiment was decided.
        """
        with self._transaction() as base:
            row = base.execute(
                "SELECT state, removed, definition FROM experiment WHERE name = ?", (experiment,)
            ).fetchone()
            if row is None:
                return False
            old = json.loads(row[1])
            removed = [*old, *(name for name in variants if name not in old)]
            if len(removed) == len(old) or row[0] != ACTIVE:
                return False
            others = {variant.name for variant in experiment_of(row[2]).variants[1:]}
            state = ROLLED_BACK if others <= set(removed) else ACTIVE
            self._write_state(base, experiment, state, "", removed, reason, now)
            return True

    def end(self, experiment: str, reason: str, now: float) -> None:
        """Send all requests to the baseline from now on."""
        with self._transaction() as base:
            self._write_state(base, experiment, ROLLED_BACK, "", [], reason, now)

    def reset(self, experiment: str, reason: str, now: float) -> None:
        """Delete the numbers of an experiment and start it again. Its variants may change then."""
        with self._transaction() as base:
            self._delete_numbers(base, experiment)
            self._write_state(base, experiment, ACTIVE, "", [], reason, now)
            base.execute("UPDATE experiment SET identity = '', checked = 0 WHERE name = ?", (experiment,))

    @staticmethod
    def _delete_numbers(base: sqlite3.Connection, experiment: str) -> None:
        """Delete the numbers, and begin a new generation, so that late sums of this one are dropped."""
        base.execute("DELETE FROM sums WHERE experiment = ?", (experiment,))
        base.execute("DELETE FROM request WHERE experiment = ?", (experiment,))
        base.execute("UPDATE experiment SET generation = generation + 1 WHERE name = ?", (experiment,))

    @staticmethod
    def _write_state(
        base: sqlite3.Connection, experiment: str, state: str, promoted: str, removed: list[str], reason: str,
        now: float,
    ) -> None:  # fmt: skip
        base.execute(
            "UPDATE experiment SET state = ?, promoted = ?, removed = ?, reason = ?, changed = ? "
            "WHERE name = ?",
            (state, promoted, json.dumps(removed), reason, now, experiment),
        )

    def _prepare(self) -> None:
        (version,) = self._base.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise ConfigError(
                f"state file {self._path} has version {version}; accepted: {VERSION}", param="folder"
            )
        use_wal(self._base, BUSY_S)
        self._base.execute("PRAGMA synchronous = NORMAL")
        with self._transaction() as base:
            for statement in _TABLES:
                base.execute(statement)
            base.execute(f"PRAGMA user_version = {VERSION}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything within is written as a whole, or not at all if an error is raised."""
        with self._lock:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield self._base
                self._base.execute("COMMIT")
            except BaseException:
                if self._base.in_transaction:
                    self._base.execute("ROLLBACK")
                raise
