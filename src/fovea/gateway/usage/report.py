"""Reads sums from a usage file, while gateways write to it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from fovea.core.errors import ConfigError
from fovea.gateway.usage.record import SUMS
from fovea.gateway.usage.store import BUSY_S, VERSION

GROUPS = {
    "tenant": "tenant",
    "model": "model",
    "backend": "backend",
    "served_from": "served_from",
    "day": "date(hour * 3600, 'unixepoch')",
    "hour": "strftime('%Y-%m-%d %H:00', hour * 3600, 'unixepoch')",
}
"""SQL of the names by which rows can be grouped. Days and hours are those of UTC."""


class Row(NamedTuple):
    """Sums of the requests of one group.

    group: its values, in the order of the names that it is grouped by.
    cost, credit, visual_cost: in millionths of the currency.
    seconds: sum of the requests' durations.
    """

    group: tuple[str, ...]
    requests: int = 0
    errors: int = 0
    estimated: int = 0
    images: int = 0
    prompt_tokens: int = 0
    visual_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: int = 0
    credit: int = 0
    visual_cost: int = 0
    seconds: float = 0.0

    @property
    def cost_per_request(self) -> float:
        """Millionths of the currency."""
        return self.cost / self.requests if self.requests else 0.0

    @property
    def cost_per_image(self) -> float:
        """The part of the cost that images cause, per image; millionths of the currency."""
        return self.visual_cost / self.images if self.images else 0.0


class Report(NamedTuple):
    """Usage of a period: a row per group, and the sums of all of them. currency: three letters."""

    currency: str
    rows: tuple[Row, ...]
    total: Row


def read_usage(path: Path, by: Sequence[str], since_hour: int, until_hour: int) -> Report:
    """Read the usage of a period.

    by: names of GROUPS.
    since_hour, until_hour: hours since the epoch; the first is included, the last is not.

    Raises ConfigError if the file cannot be read or is no usage file.
    """
    group = ", ".join(GROUPS[name] for name in by)
    sums = ", ".join(f"COALESCE(SUM({name}), 0)" for name in SUMS)
    period = "FROM usage WHERE hour >= ? AND hour < ?"
    numbers = ", ".join(str(place + 1) for place in range(len(by)))
    if not path.exists():
        raise ConfigError(f"usage file {path} does not exist", param="file")
    try:
        with closing(_connect(path)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != VERSION:
                raise ConfigError(
                    f"{path} is no usage file of this version of Fovea (its version is {version})",
                    param="file",
                )
            connection.execute("BEGIN")  # both queries see the same state
            (currency,) = connection.execute("SELECT name FROM currency").fetchone()
            rows = connection.execute(
                f"SELECT {group}, {sums} {period} GROUP BY {numbers} ORDER BY {numbers}",
                (since_hour, until_hour),
            ).fetchall()
            total = connection.execute(f"SELECT {sums} {period}", (since_hour, until_hour)).fetchone()
    except sqlite3.Error as error:
        raise ConfigError(f"usage file {path} cannot be read: {error}", param="file") from error
    count = len(by)
    return Report(currency, tuple(Row(row[:count], *row[count:]) for row in rows), Row(("",) * count, *total))


def _connect(path: Path) -> sqlite3.Connection:
    """Open a file to read it.

    A file in WAL mode is read with a second file, which SQLite creates if no gateway is running. In a folder
    where that is not allowed, the file is read as one that does not change: if its WAL is empty, no gateway
    writes to it.
    """
    address = f"file:{quote(str(path.absolute()))}?mode=ro"
    connection = sqlite3.connect(address, uri=True, timeout=BUSY_S, isolation_level=None)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        log = Path(f"{path}-wal")
        if log.exists() and log.stat().st_size:
            raise
        connection = sqlite3.connect(f"{address}&immutable=1", uri=True, timeout=BUSY_S, isolation_level=None)
    return connection
