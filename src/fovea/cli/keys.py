"""fovea keys: make, list and revoke the keys of a keys file.

A file belongs to the server or to the gateway, which have other limits. `--for` says which; without it, the
limits that are given, or that the file states, tell.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fovea.access.keys import (
    PREFIX,
    ROLES,
    KeyFile,
    KeyRecord,
    digest,
    new_key,
    parse_key_file,
    read_key_file,
)
from fovea.cli import options
from fovea.cli.text import list_line
from fovea.core.errors import ConfigError
from fovea.core.settings import flat_values
from fovea.gateway.tenants.keys import TenantLimits
from fovea.server.clients import Limits

_ENTRY = re.compile(r"\[\[\s*key\s*\]\]")
KINDS: dict[str, type[Any]] = {"server": Limits, "gateway": TenantLimits}
"""The limits that a keys file can state, by the program that reads it."""
_NAMES = {kind: tuple(flat_values(limits())) for kind, limits in KINDS.items()}


def register(commands: Any) -> None:
    parser = commands.add_parser("keys", description=__doc__)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser(
        "new",
        help="make a key, print it once, and append its hash to the file",
        description="Make a key, print it once, and append its hash to the file. A second key of a name "
        "belongs to the same client. If no limits are given, it has those of the first.",
    )
    new.add_argument("--name", required=True, help="name of the client, for logs and messages")
    new.add_argument(
        "--role",
        action="append",
        choices=ROLES,
        help="role of the key; may be given several times (default: that of the client's last key, else api)",
    )
    new.add_argument("--expires", metavar="DATE", help="day from which it is refused, as 2027-01-31 (UTC)")
    options.add_options(new, "limits", Limits)
    options.add_options(new, "limits of the gateway", TenantLimits, skip=_NAMES["server"])
    shown = actions.add_parser(
        "list",
        help="list names, fingerprints, roles and limits",
        description="List the keys of a file: name, fingerprint (the first digits of the hash, as in the "
        "server's log), roles, end, and limits. The keys themselves are not stored.",
    )
    revoke = actions.add_parser(
        "revoke",
        help="remove keys from the file",
        description="Remove all keys of a client, or one key, from the file. A running server refuses them "
        "within about a second.",
    )
    revoke.add_argument("key", metavar="NAME", help="name of a client, or the fingerprint of one key")
    revoke.add_argument(
        "--older", action="store_true", help="keep the client's last key in the file, to end a rotation"
    )
    for action, run in ((new, _new), (shown, _list), (revoke, _revoke)):
        action.add_argument(
            "--file",
            type=Path,
            default=Path(os.environ.get("FOVEA_KEYS_FILE") or "keys.toml"),
            metavar="FILE",
            help="the keys file (default: FOVEA_KEYS_FILE, else keys.toml)",
        )
        action.add_argument(
            "--for",
            dest="kind",
            choices=tuple(KINDS),
            help="program that reads the file (default: as the limits in it say, else server)",
        )
        action.set_defaults(run=run)


def _new(args: argparse.Namespace) -> int:
    given = [
        name for name in dict.fromkeys(itertools.chain(*_NAMES.values())) if getattr(args, name) is not None
    ]
    kind = _limits_class(args, given)
    limits = flat_values(options.settings(kind, args, {}, only=given))
    if args.file.exists():
        text, known = _text(args.file), read_key_file(args.file, kind)
    else:
        text, known = f'cache_secret = "{secrets.token_hex(16)}"\n', KeyFile()
    old = [record for record in known.records if record.name == args.name]
    if given and old:
        _check_same(args, replace(_default_of(text, kind), **{name: limits[name] for name in given}), old[-1])
    key = new_key()
    lines = [f"name = {json.dumps(args.name)}", f'hash = "{PREFIX}{digest(key.encode()).hex()}"']
    roles = args.role or (sorted(old[-1].roles) if old else [])
    lines += [f"roles = {list(roles)!r}"] if roles else []
    lines += [f"expires = {_date(args.expires)}"] if args.expires else []
    if given or not old:
        lines += [f"{name} = {_toml(limits[name])}" for name in given]
    else:
        values, usual = flat_values(old[-1].limits), flat_values(_default_of(text, kind))
        lines += [f"{name} = {_toml(value)}" for name, value in values.items() if value != usual[name]]
    _write(args.file, text.rstrip("\n") + "\n\n" + "\n".join(["[[key]]", *lines, ""]), kind)
    print(key)
    print(f"its hash is in {args.file}; the key itself is not stored and is not shown again", file=sys.stderr)
    return 0


def _check_same(args: argparse.Namespace, limits: Any, old: KeyRecord[Any]) -> None:
    """Raise ConfigError unless the limits of a new key are those of the client's other keys."""
    if limits == old.limits:
        return
    usual, known = flat_values(type(old.limits)()), flat_values(old.limits)
    shown = ", ".join(f"{name} = {_toml(value)}" for name, value in known.items() if value != usual[name])
    raise ConfigError(
        f"{args.name!r} has keys with other limits ({shown or 'none'}), and keys of one name share their "
        "limits; accepted: no limits, for a further key with the same ones. To change them, edit all keys "
        f"of {args.name!r} in {args.file}",
        param="name",
    )


def _list(args: argparse.Namespace) -> int:
    kind = _limits_class(args)
    file = read_key_file(args.file, kind)
    usual = flat_values(kind())
    for record in file.records:
        expires = "" if record.expires is None else f"  until {_shown(record.expires)}"
        values = flat_values(record.limits)
        limits = "".join(f"  {name}={_toml(values[name])}" for name in values if values[name] != usual[name])
        roles = ",".join(sorted(record.roles))
        print(list_line(f"{record.name}  {record.fingerprint}  {roles}{expires}{limits}"))
    return 0


def _revoke(args: argparse.Namespace) -> int:
    kind = _limits_class(args)
    text, file = _text(args.file), read_key_file(args.file, kind)
    doomed = [record for record in file.records if args.key in (record.name, record.fingerprint)]
    if args.older:
        doomed = doomed[:-1]
    if not doomed:
        raise ConfigError(f"{args.file} has no such key to revoke: {args.key!r}", param="key")
    hashes = {record.digest for record in doomed}
    blocks = _blocks(text)
    kept = "".join(block for block in blocks if not _holds(block, hashes))
    expected = tuple(record for record in file.records if record.digest not in hashes)
    if parse_key_file(kept, kind) != KeyFile(expected, file.cache_secret):
        raise ConfigError(
            f"{args.file} is laid out in a way that this command cannot change; use an editor", param="file"
        )
    _write(args.file, kept, kind)
    print(f"revoked: {', '.join(f'{record.name} {record.fingerprint}' for record in doomed)}")
    return 0


def _blocks(text: str) -> list[str]:
    """Split the text of a file into its tables, each with its header. The first part has no header."""
    blocks = [""]
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            blocks.append("")
        blocks[-1] += line
    return blocks


def _holds(block: str, hashes: set[bytes]) -> bool:
    """Whether a block is the table of one of these keys."""
    return bool(_ENTRY.match(block.strip())) and any(f"{PREFIX}{each.hex()}" in block for each in hashes)


def _limits_class(args: argparse.Namespace, given: Sequence[str] = ()) -> type[Any]:
    """Return the class of the limits of the file: as --for says, as the file states, or as flags say.

    given: the limits that flags give. Raises ConfigError if they belong to the other program.
    """
    kinds = [args.kind] if args.kind else _kinds_of(args.file)
    fitting = [kind for kind in kinds if set(given) <= set(_NAMES[kind])]
    if fitting:
        return KINDS[fitting[0]]
    kind = kinds[0]
    wrong = next(name for name in given if name not in _NAMES[kind])
    reason = f"{options.flag(wrong)} is not a limit of the {kind}"
    if len(kinds) > 1:
        reason = f"{', '.join(map(options.flag, given))}: no program has all of these limits"
    raise ConfigError(f"{reason}; accepted: {', '.join(_NAMES[kind])} for the {kind}", param=wrong)


def _kinds_of(path: Path) -> list[str]:
    """Return the programs that accept a file; both if it states no limits or does not exist."""
    if not path.exists():
        return list(KINDS)
    text, accepted = _text(path), []
    for kind, limits in KINDS.items():
        with suppress(ConfigError):
            parse_key_file(text, limits)
            accepted.append(kind)
    return accepted or ["server"]


def _toml(value: Any) -> str:
    """Write the value of a limit as TOML."""
    if isinstance(value, (bool, str)):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value) if isinstance(value, int) else f"{value:.15g}"


def _default_of(text: str, limits: type[Any]) -> Any:
    """Return the limits of a key that states none of its own in this file."""
    probe = text.rstrip("\n") + f'\n[[key]]\nname = "probe"\nhash = "{PREFIX}{"0" * 64}"\n'
    return parse_key_file(probe, limits).records[-1].limits


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"keys file {path} cannot be read: {error}", param="file") from error


def _write(path: Path, text: str, limits: type[Any]) -> None:
    """Replace the file as a whole, so that a server never reads half of it. Raises ConfigError.

    The new text is checked first. The file keeps its owner and mode; a new one can be read by its owner only.
    """
    parse_key_file(text, limits)
    try:
        path = path.resolve()
        known = path.stat() if path.exists() else None
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # with mode 600
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if known is not None:
                os.fchown(file.fileno(), known.st_uid, known.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(known.st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError as error:
        raise ConfigError(f"keys file {path} cannot be written: {error.strerror}", param="file") from error


def _date(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise ConfigError(f"--expires is {text!r}; accepted: a day, as 2027-01-31", param="expires") from None


def _shown(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
