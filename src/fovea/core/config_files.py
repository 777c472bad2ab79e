"""Files of TOML and JSON as checked values. Errors name the file, the table, the key and what is accepted.

read_toml         the content of a file; parse_toml: of a text
check_keys        refuses unknown keys, and names the nearest known one
tables            the tables of an array [[key]]
settings_table    a table as the settings class that declares it (`core.settings`)
Table             values by their types, for tables without such a class
"""

from __future__ import annotations

import datetime
import difflib
import json
import math
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fovea.core.errors import ConfigError
from fovea.core.findings import Findings, joined, renamed
from fovea.core.settings import settings_of
from fovea.core.toml_lines import toml_lines

T = TypeVar("T")
LARGEST_FILE = 1 << 20
"""Bytes of the largest file that is read."""
MOST_NAMES = 40
"""Names that a message lists at most."""
LONGEST_NAME = 100
"""Characters of an unknown name that a message shows."""


class TomlFile(dict[str, Any]):
    """The content of a TOML file, which knows in which lines its keys are.

    path: the file. text: its content. noun: what it is, for messages.
    """

    def __init__(self, values: Mapping[str, Any], path: Path, text: str, noun: str = "") -> None:
        super().__init__(values)
        self._text, self._name = text, f"{noun} {path}".strip()

    def place(self, *at: str | int) -> str:
        """Return "FILE:LINE" of a key or table, or of the nearest one around it; "FILE": no line is known."""
        line = self._line(at)
        return f"{self._name}:{line}" if line else self._name

    def _line(self, at: Sequence[str | int]) -> int:
        """Return the line of a key or table, or of the nearest one around it; 0: it is not known."""
        lines = toml_lines(self._text)
        return next((lines[tuple(at[:end])] for end in range(len(at), 0, -1) if tuple(at[:end]) in lines), 0)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Name file and line in every error of a block, in the order of the lines."""
        try:
            yield
        except ConfigError as error:
            found = [(each, (*each.at, *([each.param] if each.param else []))) for each in error.findings]
            found.sort(key=lambda pair: self._line(pair[1]))
            raise joined([renamed(each, self.place(*at)) for each, at in found]) from error


def read_toml(
    path: Path,
    noun: str = "",
    *,
    param: str | None = None,
    largest: int = LARGEST_FILE,
    parse_float: Callable[[str], Any] = float,
) -> TomlFile:
    """Return the content of a TOML file.

    noun: what the file is, for messages, such as "hardware file".
    param: the setting that names the file.
    largest: bytes of the largest file that is accepted.
    Raises ConfigError if the file cannot be read, is larger, or is not TOML.
    """
    text = _read_text(path, noun, param, largest)
    values = parse_toml(text, f"{noun} {path}".strip(), param=param, parse_float=parse_float)
    return TomlFile(values, path, text, noun)


def read_json(path: Path, noun: str = "", *, param: str | None = None) -> dict[str, Any]:
    """Return the object of a JSON file. Raises ConfigError as `read_toml` does, and for other values."""
    where = f"{noun} {path}".strip()
    try:
        values = json.loads(_read_text(path, noun, param, LARGEST_FILE))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}", param=param) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is not an object of JSON", param=param)
    return values


def _read_text(path: Path, noun: str, param: str | None, largest: int) -> str:
    where = f"{noun} {path}".strip()
    try:
        with path.open("rb") as file:
            data = file.read(largest + 1)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}", param=param) from error
    if len(data) > largest:
        raise ConfigError(f"{where} is larger than {largest:,} bytes", param=param)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text", param=param) from error


def parse_toml(
    text: str, where: str, *, param: str | None = None, parse_float: Callable[[str], Any] = float
) -> dict[str, Any]:
    """Return the content of a text. where: the text, for messages. Raises ConfigError if it is not TOML."""
    try:
        return tomllib.loads(text, parse_float=parse_float)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}", param=param) from error
    except RecursionError as error:
        raise ConfigError(f"{where} is not TOML: its values are nested too deeply", param=param) from error


def nearest(name: str, known: Collection[str]) -> str:
    """Return the known name that resembles a wrong one, else all known names, as a part of a message."""
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    more = f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
    return f"accepted: {', '.join(list(known)[:MOST_NAMES])}{more}"


def check_keys(where: str, table: Mapping[str, Any], known: Collection[str], noun: str = "key") -> None:
    """Raise ConfigError for keys that are not known; it names the nearest known one of each.

    Of more than MOST_NAMES such keys, the others are counted.

    where: file and table, for messages; "": the caller adds them.
    noun: what a key is, for messages.
    """
    start = f"{where}: " if where else ""
    unknown = [key for key in table if key not in known]
    errors = [
        ConfigError(f"{start}unknown {noun} {key[:LONGEST_NAME]!r}; {nearest(key, known)}", param=key)
        for key in unknown[:MOST_NAMES]
    ]
    if len(unknown) > MOST_NAMES:
        errors.append(ConfigError(f"{start}and {len(unknown) - MOST_NAMES:,} more unknown names"))
    if errors:
        raise joined(errors)


def tables(where: str, content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the tables of an array `[[key]]`; an empty list if there are none. Raises ConfigError."""
    found = content.get(key, [])
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        start = f"{where}: " if where else ""
        raise ConfigError(f"{start}{key} is not an array of tables; accepted: [[{key}]]", param=key)
    return found


def settings_table(
    cls: Callable[..., T], where: str, values: Any, also: Collection[str] = (), **more: Any
) -> T:
    """Return a table as its settings class. Lists become tuples.

    also: further keys that the table may hold, and that are not settings of the class.
    more: further arguments of the class; keys of the table with these names are left to the caller.
    Raises ConfigError for other values than a table, unknown keys, and values that the class refuses.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} is {values!r}; accepted: a table", param=where)
    own = [entry.name for entry in settings_of(cls, nested=False)]  # type: ignore[arg-type]
    findings = Findings()
    with findings.part():
        check_keys(where, values, [*own, *more, *also])
    given = {name: values[name] for name in own if name in values and name not in more}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    with findings.part(), errors_in(where):
        made = cls(**given, **more)
    findings.check()
    return made


@contextmanager
def errors_in(where: str, *at: str | int) -> Iterator[None]:
    """Name a file or a table in every ConfigError of a block. at: its place in the file."""
    try:
        yield
    except ConfigError as error:
        raise renamed(error, where, *at) from error


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
