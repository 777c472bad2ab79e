"""Changes a keys file: adds keys, revokes them, and changes limits, roles and ends.

    with editing(path, TenantLimits) as draft:
        key = draft.add("alice", roles=["api"], given={"requests_per_minute": 60})
        draft.write()

Comments and the order of the tables stay. A draft holds a lock on the file, so that of two processes that
change it, the second reads what the first wrote. The file is replaced as a whole, so a server never reads
half of it. Servers and gateways see the new file by themselves (`access.key_table`).

The lock is on the file itself (flock), and not on a file beside it. Whoever gets it looks whether the file
has been replaced meanwhile, and then begins again with the new one.
"""

from __future__ import annotations

import copy
import datetime
import fcntl
import json
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from fovea.access.keys import (
    LARGEST_FILE,
    PREFIX,
    KeyFile,
    KeyRecord,
    digest,
    new_key,
    parse_key_file,
    read_key_file,
)
from fovea.core.config_files import parse_toml
from fovea.core.errors import ConfigError
from fovea.core.settings import flat_values

L = TypeVar("L")
PATIENCE_S = 10.0
"""Seconds to wait for another process that changes the file."""
_RETRY_S = 0.01
_ENTRY = re.compile(r"\[\[\s*key\s*\]\]")
_FIELD = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")
_SURROGATE = re.compile("[\ud800-\udfff]")


@contextmanager
def editing(
    path: Path, limits: type[L], *, create: bool = False, patience_s: float = PATIENCE_S
) -> Iterator[Draft[L]]:
    """Lock a keys file, and yield a draft of it. Nothing changes before `Draft.write`.

    limits: the settings class of the limits that it states.
    create: whether the file may be missing.
    Raises ConfigError if it cannot be read, or if another process keeps its lock.
    """
    descriptor = _lock(path, time.monotonic() + patience_s, create=create)
    try:
        if descriptor is None:
            yield Draft(path, limits, f'cache_secret = "{secrets.token_hex(16)}"\n', KeyFile(), is_new=True)
        else:
            yield Draft(path, limits, text_of(path), read_key_file(path, limits))
    finally:
        if descriptor is not None:
            os.close(descriptor)


def text_of(path: Path) -> str:
    """Return the text of a keys file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"keys file {path} cannot be read: {error}", param="keys_file") from error


class Draft(Generic[L]):
    """The contents of a keys file that somebody changes.

    file: its keys, with the changes so far.
    """

    def __init__(
        self, path: Path, limits: type[L], text: str, file: KeyFile[L], *, is_new: bool = False
    ) -> None:
        self.file = file
        self._path, self._limits, self._text, self._is_new = path, limits, text, is_new
        self._changed = False

    def named(self, name: str) -> list[KeyRecord[L]]:
        """Return the keys of a client, oldest first."""
        return [record for record in self.file.records if record.name == name]

    def add(
        self,
        name: str,
        roles: Collection[str] = (),
        expires: datetime.date | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> str:
        """Add a new key, and return it. It is nowhere else.

        name: of its client. A further key of a client has the limits of the others.
        roles: none: those of the client's last key, else api.
        expires: the UTC day, or the time, from which it is refused.
        given: limits by name.
        Raises ConfigError for a wrong value, or for limits that the client's other keys do not have.
        """
        given, key = given or {}, new_key()
        old = self.named(name)
        if given and old:
            self._check_same(name, given, old[-1])
        values: dict[str, str] = {
            "name": toml(name),
            "hash": f'"{PREFIX}{digest(key.encode()).hex()}"',
        }
        if chosen := roles or (old[-1].roles if old else ()):
            values["roles"] = toml(tuple(sorted(chosen)))
        if expires is not None:
            values["expires"] = toml(expires)
        if given or not old:
            values |= {limit: toml(value) for limit, value in given.items()}
        else:
            known, usual = flat_values(old[-1].limits), flat_values(self._usual())
            values |= {limit: toml(value) for limit, value in known.items() if value != usual[limit]}
        lines = "".join(f"{field} = {value}\n" for field, value in values.items())
        table = f"[[key]]\n{lines}"
        entry = parse_toml(table, "it")["key"][0]
        self._use_if(
            f"{self._text.rstrip(chr(10))}\n\n{table}", lambda entries: entries.append(copy.deepcopy(entry))
        )
        return key

    def revoke(self, doomed: Sequence[KeyRecord[L]]) -> None:
        """Remove keys. Raises ConfigError if the file's layout does not allow that."""
        hashes = {record.digest for record in doomed}
        kept = "".join(_end(block) if _holds(block, hashes) else block for block in self._blocks())

        def remove(entries: list[dict[str, Any]]) -> None:
            entries[:] = [entry for entry in entries if not _is_of(entry, hashes)]

        self._use_if(kept, remove)

    def change(self, records: Sequence[KeyRecord[L]], values: Mapping[str, Any]) -> None:
        """Change fields of keys. values: by field; None removes the field, so that its default holds.

        Raises ConfigError for a wrong value, or if the file's layout does not allow it.
        """
        hashes = {record.digest for record in records}
        texts = {field: None if value is None else toml(value) for field, value in values.items()}
        changed = "".join(
            _with_fields(block, texts) if _holds(block, hashes) else block for block in self._blocks()
        )

        def assign(entries: list[dict[str, Any]]) -> None:
            for entry in entries:
                if _is_of(entry, hashes):
                    for field, value in values.items():
                        entry.pop(field, None)
                        if value is not None:
                            entry[field] = list(value) if isinstance(value, (tuple, frozenset)) else value

        self._use_if(changed, assign)

    def write(self) -> None:
        """Replace the file. It keeps its owner and mode; only its owner may read a new one.

        Raises ConfigError if it cannot be written, or would be too large to be read again.
        """
        if not self._changed:
            return
        if len(self._text.encode()) > LARGEST_FILE:
            raise ConfigError(
                f"keys file {self._path} would be too large; accepted: at most {LARGEST_FILE} bytes",
                param="keys_file",
            )
        try:
            path = self._path.resolve()
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # with mode 600
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    if not self._is_new:
                        known = path.stat()
                        os.fchown(file.fileno(), known.st_uid, known.st_gid)
                        os.fchmod(file.fileno(), stat.S_IMODE(known.st_mode))
                    file.write(self._text)
                    file.flush()
                    os.fsync(file.fileno())
                if self._is_new:
                    os.link(name, path)  # fails if another process has made the file meanwhile
                    os.unlink(name)
                else:
                    os.replace(name, path)
                _keep_names(path.parent)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            raise ConfigError(
                f"keys file {self._path} cannot be written: {error.strerror}", param="keys_file"
            ) from error

    def _check_same(self, name: str, given: Mapping[str, Any], old: KeyRecord[L]) -> None:
        """Raise ConfigError unless the limits of a new key are those of the client's other keys."""
        if replace(self._usual(), **given) == old.limits:
            return
        usual, known = flat_values(self._limits()), flat_values(old.limits)
        shown = ", ".join(f"{name} = {toml(value)}" for name, value in known.items() if value != usual[name])
        raise ConfigError(
            f"{name!r} has keys with other limits ({shown or 'none'}), and keys of one name share their "
            "limits; accepted: no limits, for a further key with the same ones. To change them, edit all "
            f"keys of {name!r} in {self._path}",
            param="name",
        )

    def _usual(self) -> Any:
        """Return the limits of a key that states none of its own in this file."""
        default = parse_toml(self._text, "it").get("default", {})
        return self._limits(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in default.items()}
        )

    def _blocks(self) -> list[str]:
        """Split the text into its tables, each with its header. The first part has no header."""
        blocks = [""]
        for line in self._text.splitlines(keepends=True):
            if line.lstrip().startswith("["):
                blocks.append("")
            blocks[-1] += line
        return blocks

    def _use_if(self, text: str, expect: Callable[[list[dict[str, Any]]], None]) -> None:
        """Use a text if it is the old one with this change of its keys, and no other.

        A change of lines cannot know every layout that TOML allows, so the result is compared.
        """
        wanted = copy.deepcopy(parse_toml(self._text, "it"))
        entries = wanted.pop("key", [])
        expect(entries)
        if entries:
            wanted["key"] = entries
        try:
            fits = parse_toml(text, "it") == wanted
        except ConfigError:
            fits = False
        if not fits:
            raise ConfigError(
                f"{self._path} is laid out in a way that cannot be changed here; use an editor",
                param="keys_file",
            )
        self._use(text)

    def _use(self, text: str) -> None:
        self.file = parse_key_file(text, self._limits)
        self._text, self._changed = text, True


def _keep_names(folder: Path) -> None:
    """Write the names of a folder to its disk, so that no revoked key comes back after a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def toml(value: Any) -> str:
    """Write a value as TOML. Raises ConfigError for a text with half of a pair of surrogates."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        if _SURROGATE.search(value):
            raise ConfigError(f"{value[:100]!r} has a character that is none of Unicode; accepted: a text")
        return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, int):
        return str(value)
    short = f"{value:.15g}"
    return short if float(short) == value else repr(value)


def _lock(path: Path, until: float, *, create: bool) -> int | None:
    """Return a descriptor that holds the lock of a file; None: there is no file, and it may be made."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            if create:
                return None
            raise ConfigError(
                f"keys file {path} cannot be read: {error.strerror}", param="keys_file"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"keys file {path} cannot be changed: {error.strerror}; accepted: a file that this user may "
                "write to, in a folder that it may write to",
                param="keys_file",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine, now = os.fstat(descriptor), os.stat(path)
            if (mine.st_dev, mine.st_ino) == (now.st_dev, now.st_ino):
                return descriptor
        except OSError:
            if time.monotonic() >= until:
                os.close(descriptor)
                raise ConfigError(
                    f"keys file {path} is being changed by another process; try again", param="keys_file"
                ) from None
            time.sleep(_RETRY_S)
        os.close(descriptor)  # another process holds it, or has replaced the file


def _with_fields(block: str, texts: Mapping[str, str | None]) -> str:
    """Return the lines of a table with other values of some fields. None removes a field."""
    lines = [
        line
        for line in block.splitlines(keepends=True)
        if (found := _FIELD.match(line)) is None or found[1] not in texts
    ]
    last = max((place for place, line in enumerate(lines) if _FIELD.match(line)), default=0)
    if not lines[last].endswith("\n"):
        lines[last] += "\n"
    lines[last + 1 : last + 1] = [f"{field} = {text}\n" for field, text in texts.items() if text is not None]
    return "".join(lines)


def _end(block: str) -> str:
    """Return the comments below the last field of a table. They may be about the table below it."""
    lines = block.splitlines(keepends=True)
    last = max(place for place, line in enumerate(lines) if line.strip() and line.lstrip()[0] != "#")
    end = "".join(lines[last + 1 :])
    return end.lstrip("\r\n") if end.strip() else ""


def _is_of(entry: dict[str, Any], hashes: set[bytes]) -> bool:
    return entry.get("hash") in {f"{PREFIX}{each.hex()}" for each in hashes}


def _holds(block: str, hashes: set[bytes]) -> bool:
    """Whether a block is the table of one of these keys."""
    return bool(_ENTRY.match(block.strip())) and any(f"{PREFIX}{each.hex()}" in block for each in hashes)
