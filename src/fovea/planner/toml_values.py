"""Reading of the planner's TOML files: every error names the file, the table, the field and the accepted
values."""

from __future__ import annotations

import datetime
import difflib
import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fovea.core.errors import ConfigError

LARGEST_FILE = 1 << 20
"""Bytes of the largest file that is read."""


def read_toml(path: Path, noun: str) -> dict[str, Any]:
    """Return the content of a TOML file.

    noun: what the file is, for messages, such as "hardware file".
    Raises ConfigError if the file cannot be read, is larger than LARGEST_FILE, or is not TOML.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{noun} {path} cannot be read: {error.strerror}") from error
    if len(data) > LARGEST_FILE:
        raise ConfigError(f"{noun} {path} is larger than {LARGEST_FILE:,} bytes")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{noun} {path} is not UTF-8 text") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{noun} {path} is not TOML: {error}") from error


def check_keys(where: str, table: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ConfigError for the first key that is not known; it names the nearest one."""
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"accepted: {', '.join(sorted(known))}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}", param=key)


def tables(where: str, content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the tables of an array `[[key]]`; an empty list if there are none. Raises ConfigError."""
    found = content.get(key, [])
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ConfigError(f"{where}: {key} is no array of tables; accepted: [[{key}]]", param=key)
    return found


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a TOML file, whose values are taken out by their types.

    where: file and table, for messages.
    values: the table.
    """

    where: str
    values: Mapping[str, Any]

    def text(self, key: str, default: str | None = None, choices: Sequence[str] = ()) -> str:
        """Return a text. Raises ConfigError if it is missing or empty without a default, or no choice."""
        accepted = ", ".join(choices) or "a text"
        value = self._value(key, default, accepted)
        if (
            not isinstance(value, str)
            or (default is None and not value)
            or (choices and value not in choices)
        ):
            self._refuse(key, value, accepted)
        return value

    def texts(self, key: str, choices: Sequence[str] = ()) -> tuple[str, ...]:
        """Return a list of texts, empty if there is none. Raises ConfigError for other values."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._refuse(key, value, "a list of texts")
        for item in value:
            if choices and item not in choices:
                self._refuse(key, item, ", ".join(choices))
        return tuple(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false. Raises ConfigError for other values."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Return a number from `low` to `high`. Raises ConfigError for others, also NaN and booleans."""
        accepted = f"{low:.12g} to {high:.12g}"
        value = self._value(key, default, accepted)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self._refuse(key, value, accepted)
        return float(value)

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        """Return a number as `number` does, or None if there is none."""
        return self.number(key, low, high) if key in self.values else None

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number from `low` to `high`. Raises ConfigError for other values."""
        value = self.number(key, low, high, default)
        if not value.is_integer():
            self._refuse(key, value, f"a whole number from {low} to {high}")
        return int(value)

    def numbers(self, key: str, names: Sequence[str], low: float, high: float) -> dict[str, float]:
        """Return a table of numbers by name, empty if there is none. Raises ConfigError for unknown names."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self._refuse(key, value, f"a table of {', '.join(names)}")
        inner = Table(f"{self.where}: {key}", value)
        check_keys(inner.where, value, names)
        return {name: inner.number(name, low, high) for name in value}

    def day(self, key: str) -> datetime.date:
        """Return a date without a time. Raises ConfigError for other values."""
        accepted = "a date, as 2026-05-07"
        value = self._value(key, None, accepted)
        if not isinstance(value, datetime.date) or isinstance(value, datetime.datetime):
            self._refuse(key, value, accepted)
        return value

    def _value(self, key: str, default: Any, accepted: str) -> Any:
        if key not in self.values and default is None:
            raise ConfigError(f"{self.where}: {key} is missing; accepted: {accepted}", param=key)
        return self.values.get(key, default)

    def _refuse(self, key: str, value: Any, accepted: str) -> NoReturn:
        shown = value if isinstance(value, float) and not math.isfinite(value) else repr(value)
        raise ConfigError(f"{self.where}: {key} is {shown}; accepted: {accepted}", param=key)
