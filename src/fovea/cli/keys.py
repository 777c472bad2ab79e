"""fovea keys: make, list and revoke the keys of a keys file."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import secrets
import stat
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from fovea.access.keyfile import (
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
from fovea.core.errors import ConfigError
from fovea.core.settings import flat_values
from fovea.server.access.limits import Limits

_ENTRY = re.compile(r"\[\[\s*key\s*\]\]")


def register(commands: Any) -> None:
    parser = commands.add_parser(
        "keys", help="make, list and revoke keys of a keys file", description=__doc__
    )
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
        action.set_defaults(run=run)


def _new(args: argparse.Namespace) -> int:
    given = [entry for entry in flat_values(Limits()) if getattr(args, entry) is not None]
    limits = flat_values(options.settings(Limits, args, {}, only=given))
    if args.file.exists():
        text, known = _text(args.file), read_key_file(args.file, Limits)
    else:
        text, known = f'cache_secret = "{secrets.token_hex(16)}"\n', KeyFile()
    old = [record for record in known.records if record.name == args.name]
    if given and old:
        _check_same(args, replace(_default_of(text), **{name: limits[name] for name in given}), old[-1])
    key = new_key()
    lines = [f"name = {json.dumps(args.name)}", f'hash = "{PREFIX}{digest(key.encode()).hex()}"']
    roles = args.role or (sorted(old[-1].roles) if old else [])
    lines += [f"roles = {list(roles)!r}"] if roles else []
    lines += [f"expires = {_date(args.expires)}"] if args.expires else []
    if given or not old:
        lines += [f"{name} = {limits[name]}" for name in given]
    else:
        values, usual = flat_values(old[-1].limits), flat_values(_default_of(text))
        lines += [f"{name} = {value}" for name, value in values.items() if value != usual[name]]
    _write(args.file, text.rstrip("\n") + "\n\n" + "\n".join(["[[key]]", *lines, ""]))
    print(key)
    print(f"its hash is in {args.file}; the key itself is not stored and is not shown again", file=sys.stderr)
    return 0


def _check_same(args: argparse.Namespace, limits: Limits, old: KeyRecord[Limits]) -> None:
    """Raise ConfigError unless the limits of a new key are those of the client's other keys."""
    if limits == old.limits:
        return
    usual, known = flat_values(Limits()), flat_values(old.limits)
    shown = ", ".join(f"{name} = {value:g}" for name, value in known.items() if value != usual[name])
    raise ConfigError(
        f"{args.name!r} has keys with other limits ({shown or 'none'}), and keys of one name share their "
        "limits; accepted: no limits, for a further key with the same ones. To change them, edit all keys "
        f"of {args.name!r} in {args.file}",
        param="name",
    )


def _list(args: argparse.Namespace) -> int:
    file = read_key_file(args.file, Limits)
    usual = flat_values(Limits())
    for record in file.records:
        expires = "" if record.expires is None else f"  until {_shown(record.expires)}"
        values = flat_values(record.limits)
        limits = "".join(f"  {name}={values[name]:g}" for name in values if values[name] != usual[name])
        print(f"{record.name}  {record.fingerprint}  {','.join(sorted(record.roles))}{expires}{limits}")
    return 0


def _revoke(args: argparse.Namespace) -> int:
    text, file = _text(args.file), read_key_file(args.file, Limits)
    doomed = [record for record in file.records if args.key in (record.name, record.fingerprint)]
    if args.older:
        doomed = doomed[:-1]
    if not doomed:
        raise ConfigError(f"{args.file} has no such key to revoke: {args.key!r}", param="key")
    hashes = {record.digest for record in doomed}
    blocks = _blocks(text)
    kept = "".join(block for block in blocks if not _holds(block, hashes))
    expected = tuple(record for record in file.records if record.digest not in hashes)
    if parse_key_file(kept, Limits) != KeyFile(expected, file.cache_secret):
        raise ConfigError(
            f"{args.file} is laid out in a way that this command cannot change; use an editor",
            param="file",
        )
    _write(args.file, kept)
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


def _default_of(text: str) -> Limits:
    """Return the limits of a key that states none of its own in this file."""
    probe = text.rstrip("\n") + f'\n[[key]]\nname = "probe"\nhash = "{PREFIX}{"0" * 64}"\n'
    record: KeyRecord[Limits] = parse_key_file(probe, Limits).records[-1]
    return record.limits


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"keys file {path} cannot be read: {error}", param="file") from error


def _write(path: Path, text: str) -> None:
    """Replace the file as a whole, so that a server never reads half of it. Raises ConfigError.

    The new text is checked first. The file keeps its owner and mode; a new one can be read by its owner only.
    """
    parse_key_file(text, Limits)
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
