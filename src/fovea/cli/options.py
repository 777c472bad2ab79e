"""Settings from flags, environment variables and a TOML file, in that order of precedence.

The flags are the settings that configuration classes declare (`core.settings`). Name, type, default, range
and help are written there and nowhere else. The flag `--max-queue`, the variable `FOVEA_MAX_QUEUE` and the
key `max_queue` of the TOML file give the same setting.
"""

from __future__ import annotations

import argparse
import difflib
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar

from fovea.core.config_files import TomlFile, check_keys, read_toml
from fovea.core.errors import ConfigError
from fovea.core.findings import Findings, joined, renamed
from fovea.core.settings import (
    Setting,
    build_settings,
    inner_type,
    settings_of,
    type_in_words,
    value_errors,
)

T = TypeVar("T")
PREFIX = "FOVEA_"
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def add_options(
    parser: argparse.ArgumentParser,
    title: str,
    cls: type,
    *,
    skip: Iterable[str] = (),
    only: Iterable[str] | None = None,
) -> None:
    """Add a flag for every setting of a class. Each subject has a group of its own.

    A flag that is not given has the value None.

    title: title of the groups.
    skip: names without a flag.
    only: the only names with a flag; None: all.
    """
    groups: dict[tuple[str, ...], argparse._ArgumentGroup] = {}
    for entry in settings_of(cls):
        if entry.rule.internal or entry.name in skip or (only is not None and entry.name not in only):
            continue
        if entry.subject not in groups:
            groups[entry.subject] = parser.add_argument_group(" ".join((title, *entry.subject)))
        action = groups[entry.subject].add_argument(
            flag(entry.name),
            dest=entry.name,
            default=None,
            metavar=_metavar(entry.hint),
            help=_help(entry).replace("%", "%%"),
        )
        if words := _words(entry):
            accepts(action, words)


def accepts(action: argparse.Action, words: Iterable[str], *, paths: bool = False) -> None:
    """Let shells complete an argument to these words, or to the last of several words with commas between.

    paths: whether paths of files are accepted, too.
    """

    def completer(prefix: str, **_: Any) -> list[str]:
        before, comma, _last = prefix.rpartition(",")
        found = [before + comma + word for word in words]
        if paths:
            from argcomplete.completers import FilesCompleter

            found += FilesCompleter()(prefix)
        return found

    action.completer = completer  # type: ignore[attr-defined]


def _words(entry: Setting) -> list[str]:
    """Return the texts that a setting accepts, as far as they can be listed."""
    optional = isinstance(entry.hint, types.UnionType)
    hint = inner_type(entry.hint) if optional else entry.hint
    words = ["true", "false"] if hint is bool else [word for word in entry.rule.choices if word]
    return [*words, "none"] if words and optional and "none" not in words else words


def show_first(parser: argparse.ArgumentParser, names: Collection[str]) -> None:
    """Let --help show only these of the flags that the parser has, and add --help-all, which shows all."""
    flags = {action.dest for action in parser._actions if action.option_strings}
    hide(parser, flags.difference(names, ("help",)))


def hide(parser: argparse.ArgumentParser, names: Collection[str]) -> None:
    """Leave flags out of --help, and add --help-all, which shows all. names: of the settings, or flags."""

    class First(argparse.HelpFormatter):
        """Leaves out the flags that --help does not show."""

        def add_argument(self, action: argparse.Action) -> None:
            if not action.option_strings or action.dest not in names:
                super().add_argument(action)

    class All(argparse.Action):
        """The action of --help-all."""

        def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
            parser.formatter_class = argparse.HelpFormatter
            parser.print_help()
            parser.exit()

    parser.formatter_class = First
    parser.add_argument("--help-all", dest="help", action=All, nargs=0, help="show all flags, and exit")


def refuse_options(parser: argparse.ArgumentParser, names: Iterable[str], reason: str) -> None:
    """Add flags that raise ConfigError with the reason when they are given. They are not in the help."""

    class Refuse(argparse.Action):
        """The action of a flag that is always refused."""

        def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
            raise ConfigError(f"{self.option_strings[0]}: {reason}", param=self.dest)

    for name in names:
        parser.add_argument(flag(name), dest=f"refused_{name}", action=Refuse, help=argparse.SUPPRESS)


def flag(name: str) -> str:
    """Return the command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def settings(
    cls: type[T],
    args: argparse.Namespace,
    file: Mapping[str, Any],
    *,
    only: Iterable[str] | None = None,
    **fixed: Any,
) -> T:
    """Build settings from flags, environment, file and defaults, in this order of precedence.

    cls: the settings class.
    only: the only names that are read; None: all.
    fixed: values that override all of these.
    Raises ConfigError, naming the source of the wrong value.
    """
    return _build(cls, lambda name: lookup(name, args, file), only, fixed)


def flag_settings(cls: type[T], args: argparse.Namespace) -> T:
    """Build settings from flags and defaults alone, where names mean something else than in a server.

    Raises ConfigError, naming the flag of the wrong value.
    """
    return _build(cls, lambda name: _from_flag(name, args), None, {})


def flag_values(cls: type, args: argparse.Namespace, only: Collection[str] | None = None) -> dict[str, Any]:
    """Return the values of the flags that are given, by name. Raises ConfigError for a wrong type.

    only: the only names that are read; None: all.
    """
    values, _, errors = _given(cls, lambda name: _from_flag(name, args), only or setting_names(cls))
    if errors:
        raise joined(errors)
    return values


Found = tuple[Any, str] | None
"""A value and its source, in words."""


def _build(
    cls: type[T], find: Callable[[str], Found], only: Iterable[str] | None, fixed: Mapping[str, Any]
) -> T:
    names = [name for name in setting_names(cls) if name not in fixed and (only is None or name in only)]
    values, sources, errors = _given(cls, find, names)
    if errors:  # rules about several settings are not checked, because some values are missing
        known = [(entry, values[entry.name]) for entry in settings_of(cls) if entry.name in values]
        raise joined([*errors, *_with_sources(value_errors(known), sources)])
    try:
        return build_settings(cls, {**fixed, **values})
    except ConfigError as error:
        raise joined(_with_sources(error.findings, sources)) from error


def _with_sources(errors: Iterable[ConfigError], sources: Mapping[str, str]) -> list[ConfigError]:
    """Return errors that name the source of the wrong value, if it is not a default.

    The messages name the setting, so of a file its place is enough.
    """
    return [
        renamed(each, sources.get(each.param or "", "").removesuffix(f": {each.param}")) for each in errors
    ]


def _given(
    cls: type, find: Callable[[str], Found], names: Collection[str]
) -> tuple[dict[str, Any], dict[str, str], list[ConfigError]]:
    """Return the values that are given and their sources, by name, and the errors of the others."""
    values, sources = {}, {}
    errors: list[ConfigError] = []
    for entry in settings_of(cls):
        if entry.name in names and (given := find(entry.name)) is not None:
            sources[entry.name] = given[1]
            try:
                values[entry.name] = _convert(given[0], entry, given[1])
            except ConfigError as error:
                errors.append(error)
    return values, sources, errors


def wrong_values(values: Mapping[str, Any], *classes: type) -> list[ConfigError]:
    """Return an error for every value that a file may not give to a setting of these classes.

    Paths are not checked, because they may be those of another machine.
    """
    errors: list[ConfigError] = []
    for cls in classes:
        entries = {
            entry.name: entry
            for entry in settings_of(cls)
            if entry.name in values and Path not in (entry.hint, *typing.get_args(entry.hint))
        }
        given, _, wrong = _given(cls, lambda name: (values[name], name), entries)
        errors += [*wrong, *value_errors((entries[name], value) for name, value in given.items())]
    return errors


def _from_flag(name: str, args: argparse.Namespace) -> Found:
    value = getattr(args, name, None)
    return None if value is None else (value, flag(name))


def lookup(name: str, args: argparse.Namespace, file: Mapping[str, Any]) -> Found:
    """Return the value of highest precedence and its source; None: it is not given."""
    given = _from_flag(name, args)
    if given is not None:
        return given
    variable = PREFIX + name.upper()
    if os.environ.get(variable):
        return os.environ[variable], variable
    if name in file:
        place = file.place(name) if isinstance(file, TomlFile) else "the configuration file"
        return file[name], f"{place}: {name}"
    return None


def file_path(given: str | None) -> Path | None:
    """Return the path of --config or FOVEA_CONFIG; None: there is no file."""
    path = given or os.environ.get(PREFIX + "CONFIG")
    return Path(path).expanduser().absolute() if path else None


def read_file(path: str | None, known: Sequence[str], findings: Findings | None = None) -> Mapping[str, Any]:
    """Read the TOML file of --config or FOVEA_CONFIG. Raises ConfigError.

    The error for an unknown key names the nearest known one.
    findings: collects errors of keys; then the known keys are returned in any case. None: they are raised.
        A file that is not TOML raises in any case: without its values, further errors would mislead.
    """
    path = path or os.environ.get(PREFIX + "CONFIG")
    if not path:
        return {}
    found, values = findings or Findings(), read_toml(Path(path))
    with found.part(), values.errors():
        check_keys("", values, known)
    if findings is None:
        found.check()
    return values


def setting_names(*classes: type) -> list[str]:
    """Return the names of all settings that users can give."""
    return [entry.name for cls in classes for entry in settings_of(cls) if not entry.rule.internal]


def misspelt_variables(known: Sequence[str]) -> list[str]:
    """Return a line for every FOVEA_* variable that resembles a setting but is none. Others are ignored."""
    names = [PREFIX + name.upper() for name in (*known, "config")]
    lines = []
    unknown = {variable for variable in os.environ if variable.startswith(PREFIX)} - set(names)
    for variable in sorted(unknown):
        near = difflib.get_close_matches(variable, names, n=1, cutoff=0.85)
        if near:
            lines.append(f"{variable} is not a setting; did you mean {near[0]}?")
    return lines


def _convert(value: Any, entry: Setting, source: str) -> Any:
    hint = entry.hint
    if isinstance(hint, types.UnionType):
        if value in ("", "none"):
            return None
        hint = inner_type(hint)
    try:
        return _read(value, hint)
    except (ValueError, TypeError, RuntimeError) as error:
        accepted = type_in_words(entry.hint) + (f", {entry.rule.accepted}" if entry.rule.accepted else "")
        raise ConfigError(f"{source} is {value!r}; accepted: {accepted}", param=entry.name) from error


def _read(value: Any, hint: Any) -> Any:
    """Convert a value to a type. Text is parsed; a value of the file must have the type already."""
    if typing.get_origin(hint) is tuple:
        items = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise TypeError("a list is needed")
        return tuple(_read(item, typing.get_args(hint)[0]) for item in items)
    if hint is bool:
        return value if isinstance(value, bool) else _boolean(str(value))
    if hint is Path:
        return Path(value).expanduser().absolute()
    if hint in (int, float) and isinstance(value, str):
        return hint(value)
    wanted = (int, float) if hint is float else hint
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise TypeError(f"{hint.__name__} is needed")
    return hint(value)


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError("true or false is needed")


def _help(entry: Setting) -> str:
    """Return the help text with default and range."""
    accepted = entry.rule.accepted
    notes = [f"default: {_shown(entry.default)}", *([f"accepted: {accepted}"] if accepted else [])]
    return f"{entry.rule.help} ({'; '.join(notes)})".strip()


def _shown(value: Any) -> str:
    if value is MISSING:
        return "required"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value in (None, "") else str(value).lower() if isinstance(value, bool) else str(value)


def _metavar(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return "A,B"
    if isinstance(hint, types.UnionType):
        return _metavar(inner_type(hint))
    return {int: "N", float: "X", bool: "true|false"}.get(hint, "TEXT" if hint is str else "PATH")
