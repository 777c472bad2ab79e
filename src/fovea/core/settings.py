"""Declarations of settings: type, default, range and help in one place, read by one checker.

    @dataclass(frozen=True, slots=True)
    class CacheSettings:
        \"\"\"Ceilings of the caches.\"\"\"

        size_mib: int = setting(256, "Ceiling of the cache in MiB. 0 turns it off.", low=0, high=1 << 24)

        def __post_init__(self) -> None:
            check_settings(self)

The command line, environment variables and the configuration file take names, types, defaults and help from
these declarations (`cli.options`). A settings class may hold others as fields ("subjects"); outside of Python
their settings are one flat list of names.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from fovea.core.errors import ConfigError
from fovea.core.findings import joined

T = TypeVar("T")
_RULE = "fovea.setting"


@dataclass(frozen=True, slots=True)
class Rule:
    """The accepted values of one setting, and its help text.

    help: what the setting does.
    low, high: bounds of a number, or of every number of a tuple; both included. Both are given, or neither.
    or_zero: 0 is accepted beside the range.
    choices: the only values of a text, or of every text of a tuple.
    check: a function of a value, or of every item of a tuple. It returns an empty text if the value is
        accepted; otherwise it returns the accepted values in words, or raises ConfigError.
    words: the accepted values in words, if neither bounds nor choices tell them.
    nonempty: a tuple needs at least one item.
    internal: set by code, never by users.
    """

    help: str
    low: float | None = None
    high: float | None = None
    or_zero: bool = False
    choices: tuple[str, ...] = ()
    check: Callable[[Any], str] | None = None
    words: str = ""
    nonempty: bool = False
    internal: bool = False

    @property
    def accepted(self) -> str:
        """The accepted values in words; empty if every value of the type is accepted."""
        if self.choices:
            return ", ".join(word or "empty" for word in self.choices)
        if self.low is None or self.high is None:
            return self.words
        zero = "0, or " if self.or_zero else ""
        return f"{zero}{self.low:.12g} to {self.high:.12g}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a settings class.

    name: name of the field.
    hint: type of the field.
    default: value if none is given; MISSING if one has to be given.
    rule: accepted values and help.
    subject: names of the fields that lead from the outer settings class to the one that declares it.
    """

    name: str
    hint: Any
    default: Any
    rule: Rule
    subject: tuple[str, ...] = ()


def setting(
    default: T,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    or_zero: bool = False,
    choices: tuple[str, ...] = (),
    check: Callable[[Any], str] | None = None,
    words: str = "",
    nonempty: bool = False,
    internal: bool = False,
) -> T:
    """Declare a field of a settings class. The arguments are those of `Rule`.

    Raises TypeError for one bound without the other.
    """
    if (low is None) != (high is None):
        raise TypeError("a setting has both low and high, or neither")
    rule = Rule(help, low, high, or_zero, choices, check, words, nonempty, internal)
    return field(default=default, metadata={_RULE: rule})


def required(help: str) -> Any:
    """Declare a field without a default."""
    return field(metadata={_RULE: Rule(help)})


def check_settings(settings: Any) -> None:
    """Raise ConfigError for all settings whose values are not accepted. For use in `__post_init__`."""
    entries = settings_of(type(settings), nested=False)
    errors = value_errors((entry, getattr(settings, entry.name)) for entry in entries)
    if errors:
        raise joined(errors)


def value_errors(values: Iterable[tuple[Setting, Any]]) -> list[ConfigError]:
    """Return an error for every value that its setting does not accept."""
    errors = []
    for entry, value in values:
        try:
            check_value(entry, value)
        except ConfigError as error:
            errors.append(error)
    return errors


def check_value(entry: Setting, value: Any) -> None:
    """Raise ConfigError unless a value is accepted.

    The message names the setting, the value (of a tuple, the first wrong item) and the accepted values.
    """
    rule, hint = entry.rule, entry.hint
    accepted = rule.accepted or type_in_words(hint)
    if isinstance(hint, types.UnionType):
        if value is None:
            return
        hint = inner_type(hint)
        accepted = f"{rule.accepted}, or none" if rule.accepted else accepted
    if typing.get_origin(hint) is not tuple:
        if problem := _problem(value, hint, rule, accepted):
            shown = str(value) if isinstance(value, Path) else value
            raise ConfigError(f"{entry.name} is {shown!r}; accepted: {problem}", param=entry.name)
        return
    if not isinstance(value, tuple) or (rule.nonempty and not value):
        accepted = accepted if accepted.endswith(", as A,B") else f"{accepted}, as A,B"
        raise ConfigError(f"{entry.name} is {value!r}; accepted: {accepted}", param=entry.name)
    for item in value:
        if problem := _problem(item, typing.get_args(hint)[0], rule, accepted):
            raise ConfigError(f"{entry.name} has {item!r}; accepted: {problem}", param=entry.name)


def _problem(value: Any, kind: Any, rule: Rule, accepted: str) -> str:
    """Return an empty text if the value is accepted, otherwise the accepted values in words."""
    if not _fits(value, kind, rule):
        return accepted
    return "" if rule.check is None else rule.check(value)


def _fits(value: Any, kind: Any, rule: Rule) -> bool:
    """Tell whether one value has the type and is within the rule.

    NaN is within no range; a bool is not a number.
    """
    types_of_kind = (int, float) if kind is float else kind
    if not isinstance(value, types_of_kind) or (isinstance(value, bool) and kind is not bool):
        return False
    if rule.choices:
        return value in rule.choices
    if rule.low is None or rule.high is None:
        return True
    return bool((rule.or_zero and value == 0) or rule.low <= value <= rule.high)


def settings_of(cls: type, *, nested: bool = True) -> tuple[Setting, ...]:
    """Return the settings of a class in order of declaration.

    nested: whether the settings of its subjects are included, each subject at its place.
    """
    return tuple(entry for entry in _all_settings(cls) if nested or not entry.subject)


@functools.cache
def _all_settings(cls: type) -> tuple[Setting, ...]:
    return tuple(_settings(cls, ()))


def _settings(cls: type, path: tuple[str, ...]) -> Iterator[Setting]:
    hints = typing.get_type_hints(cls)
    for entry in fields(cls):
        hint = hints[entry.name]
        if is_dataclass(hint):
            yield from _settings(cast(type, hint), (*path, entry.name))
        elif _RULE in entry.metadata:
            yield Setting(entry.name, hint, _default(entry), entry.metadata[_RULE], path)


def build_settings(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build an instance from a flat mapping of names to values.

    Raises ConfigError for all unknown names and wrong values.
    """
    known = {entry.name: entry for entry in settings_of(cls)}
    errors = [
        ConfigError(f"unknown setting {name!r}; known: {', '.join(sorted(known))}", param=name)
        for name in values
        if name not in known
    ] + value_errors((known[name], value) for name, value in values.items() if name in known)
    if errors:
        raise joined(errors)
    return _build(cls, (), {name: (known[name].subject, value) for name, value in values.items()})


def _build(cls: type[T], path: tuple[str, ...], values: Mapping[str, tuple[tuple[str, ...], Any]]) -> T:
    hints = typing.get_type_hints(cls)
    arguments = {name: value for name, (subject, value) in values.items() if subject == path}
    for entry in fields(cast(Any, cls)):
        if is_dataclass(hints[entry.name]):
            arguments[entry.name] = _build(cast(type, hints[entry.name]), (*path, entry.name), values)
    return cls(**arguments)


def flat_values(settings: Any) -> dict[str, Any]:
    """Return the values of all settings by name. This is the inverse of `build_settings`."""
    values = {}
    for entry in settings_of(type(settings)):
        owner = settings
        for name in entry.subject:
            owner = getattr(owner, name)
        values[entry.name] = getattr(owner, entry.name)
    return values


def inner_type(hint: Any) -> Any:
    """Return the type T of the optional type `T | None`."""
    return next(arg for arg in typing.get_args(hint) if arg is not type(None))


def type_in_words(hint: Any) -> str:
    """Describe the values of a type, for messages."""
    if isinstance(hint, types.UnionType):
        return f"{type_in_words(inner_type(hint))}, or none"
    if typing.get_origin(hint) is tuple:
        many = {int: "whole numbers, as A,B", float: "numbers, as A,B"}
        return many.get(typing.get_args(hint)[0], "names, as A,B")
    words = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
    return words.get(hint, "text")


def _default(entry: Field[Any]) -> Any:
    if entry.default is not MISSING:
        return entry.default
    return MISSING if entry.default_factory is MISSING else entry.default_factory()
