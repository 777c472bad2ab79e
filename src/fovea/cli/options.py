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
    values = dict(fixed)
    for field in fields(cls):
        if field.name in fixed:
            continue
        found = lookup(field.name, args, file)
        if found is not None:
            values[field.name] = _convert(found[0], hints[field.name], found[1], field.name)
    return cls(**values)


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
        values = tomllib.loads(Path(path).read_text())
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


def _convert(value: Any, hint: Any, source: str, name: str) -> Any:
    options = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if isinstance(hint, types.UnionType) and len(options) == 1:
        return None if value in ("", "none") else _convert(value, options[0], source, name)
    try:
        if typing.get_origin(hint) is tuple:
            parts = value.split(",") if isinstance(value, str) else list(value)
            return tuple(
                typing.get_args(hint)[0](part.strip() if isinstance(part, str) else part) for part in parts
            )
        if hint is bool:
            return value if isinstance(value, bool) else _flag(str(value))
        if isinstance(value, bool):
            raise ValueError("a number is needed")
        if hint is Path:
            return Path(value).expanduser().absolute()
        return hint(value)
    except (ValueError, TypeError) as error:
        kind = getattr(hint, "__name__", str(hint))
        raise ConfigError(f"{source} is {value!r}; accepted: {kind} ({error})", param=name) from error


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
