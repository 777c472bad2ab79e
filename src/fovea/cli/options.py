"""Settings from flags, environment and a file, in that order of precedence.

The flags are the fields of the configuration classes: their names, types, defaults and help come from there, so a
setting is described once. `--max-queue` is `FOVEA_MAX_QUEUE` is `max_queue` in the TOML file.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from fovea.core.errors import ConfigError

PREFIX = "FOVEA_"
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def field_help(cls: type) -> dict[str, str]:
    """What the class docstring says of each field: `name: text`, or `a, b: text`, up to the next such line."""
    names = {field.name for field in fields(cls)}
    helps: dict[str, str] = {}
    current: list[str] = []
    for line in (cls.__doc__ or "").splitlines():
        match = re.match(r"\s*([a-z_, ]+): (.*)", line)
        listed = [name.strip() for name in match.group(1).split(",")] if match else []
        if match and all(name in names for name in listed):
            current = listed
            for name in listed:
                helps[name] = match.group(2).strip()
        elif current and line.strip():
            for name in current:
                helps[name] += " " + line.strip()
    return helps


def add_options(parser: argparse.ArgumentParser, title: str, cls: type, skip: Sequence[str] = ()) -> None:
    """A flag for every field of a configuration class, unset unless given."""
    group = parser.add_argument_group(title)
    helps, hints = field_help(cls), typing.get_type_hints(cls)
    for field in fields(cls):
        if field.name in skip:
            continue
        text = f"{helps.get(field.name, '')} (default: {_shown(field)})".replace("%", "%%").strip()
        flag = "--" + field.name.replace("_", "-")
        group.add_argument(
            flag, dest=field.name, default=None, metavar=_metavar(hints[field.name]), help=text
        )


def settings(cls: type, args: argparse.Namespace, file: Mapping[str, Any], **fixed: Any) -> Any:
    """An instance of `cls`: flags over environment over file over defaults. Raises ConfigError naming the source."""
    hints = typing.get_type_hints(cls)
    values, sources = dict(fixed), {}
    for field in fields(cls):
        if field.name in fixed:
            continue
        found = lookup(field.name, args, file)
        if found is not None:
            values[field.name] = _convert(found[0], hints[field.name], found[1], field.name)
            sources[field.name] = found[1]
    try:
        return cls(**values)
    except ConfigError as error:
        if error.param not in sources:
            raise
        raise ConfigError(f"{sources[error.param]}: {error.message}", param=error.param) from error


def lookup(name: str, args: argparse.Namespace, file: Mapping[str, Any]) -> tuple[Any, str] | None:
    """The value that wins and where it was said, or None."""
    flag = getattr(args, name, None)
    if flag is not None:
        return flag, f"--{name.replace('_', '-')}"
    variable = PREFIX + name.upper()
    if os.environ.get(variable):
        return os.environ[variable], variable
    if name in file:
        return file[name], f"{name} in the configuration file"
    return None


def read_file(path: str | None, known: Sequence[str]) -> dict[str, Any]:
    """The TOML file of --config or FOVEA_CONFIG. Raises ConfigError for an unknown key, naming the nearest."""
    path = path or os.environ.get(PREFIX + "CONFIG")
    if not path:
        return {}
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can not be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"{path}: unknown key {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
    return values


def field_names(*classes: type) -> list[str]:
    return [field.name for cls in classes for field in fields(cls)]


def misspelt_variables(known: Sequence[str]) -> list[str]:
    """A line for every FOVEA_* variable that is no setting but looks like one. Others may be anybody's."""
    names = [PREFIX + name.upper() for name in (*known, "config")]
    lines = []
    for variable in sorted(set(os.environ) - set(names)):
        near = difflib.get_close_matches(variable, names, n=1, cutoff=0.85)
        if variable.startswith(PREFIX) and near:
            lines.append(f"{variable} is not a setting; did you mean {near[0]}?")
    return lines


def _convert(value: Any, hint: Any, source: str, name: str) -> Any:
    optional = isinstance(hint, types.UnionType)
    if optional:
        if value in ("", "none"):
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    try:
        return _read(value, hint)
    except (ValueError, TypeError, RuntimeError) as error:
        accepted = _accepted(hint) + (", or none" if optional else "")
        raise ConfigError(f"{source} is {value!r}; accepted: {accepted}", param=name) from error


def _read(value: Any, hint: Any) -> Any:
    """`value` as `hint`. Text is parsed; a value of the file must have the type already: 1.5 is no whole number."""
    if typing.get_origin(hint) is tuple:
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        if not isinstance(parts, list):
            raise TypeError("a list is needed")
        return tuple(_read(part, typing.get_args(hint)[0]) for part in parts)
    if hint is bool:
        return value if isinstance(value, bool) else _flag(str(value))
    if hint is Path:
        return Path(value).expanduser().absolute()
    if hint in (int, float) and isinstance(value, str):
        return hint(value)
    wanted = (int, float) if hint is float else hint
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise TypeError(f"{hint.__name__} is needed")
    return hint(value)


def _accepted(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        many = {int: "whole numbers, as A,B", float: "numbers, as A,B"}
        return many.get(typing.get_args(hint)[0], "names, as A,B")
    words = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
    return words.get(hint, "text")


def _flag(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError("true or false is needed")


def _shown(field: Field[Any]) -> str:
    if field.default is not MISSING:
        value = field.default
    elif field.default_factory is not MISSING:
        value = field.default_factory()
    else:
        return "required"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _metavar(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return "A,B"
    if isinstance(hint, types.UnionType):
        return _metavar(next(arg for arg in typing.get_args(hint) if arg is not type(None)))
    return {int: "N", float: "X", bool: "true|false"}.get(hint, "TEXT" if hint is str else "PATH")
