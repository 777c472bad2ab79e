"""fovea keys: make, list and revoke the keys of a keys file.

A file belongs to the server or to the gateway, which have other limits. `--for` says which; without it, the
limits that are given, or that the file states, tell.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fovea.access.key_edit import editing, text_of, toml
from fovea.access.keys import ROLES, parse_key_file, read_key_file
from fovea.cli import options
from fovea.cli.text import list_line
from fovea.core.errors import ConfigError
from fovea.core.settings import flat_values
from fovea.gateway.tenants.keys import TenantLimits
from fovea.server.clients import Limits

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
    expires = _date(args.expires) if args.expires else None
    with editing(args.file, kind, create=True) as draft:
        key = draft.add(args.name, args.role or (), expires, {name: limits[name] for name in given})
        draft.write()
    print(key)
    print(f"its hash is in {args.file}; the key itself is not stored and is not shown again", file=sys.stderr)
    return 0


def _list(args: argparse.Namespace) -> int:
    kind = _limits_class(args)
    file = read_key_file(args.file, kind)
    usual = flat_values(kind())
    for record in file.records:
        expires = "" if record.expires is None else f"  until {_shown(record.expires)}"
        values = flat_values(record.limits)
        limits = "".join(f"  {name}={toml(values[name])}" for name in values if values[name] != usual[name])
        roles = ",".join(sorted(record.roles))
        print(list_line(f"{record.name}  {record.fingerprint}  {roles}{expires}{limits}"))
    return 0


def _revoke(args: argparse.Namespace) -> int:
    with editing(args.file, _limits_class(args)) as draft:
        doomed = [record for record in draft.file.records if args.key in (record.name, record.fingerprint)]
        if args.older:
            doomed = doomed[:-1]
        if not doomed:
            raise ConfigError(f"{args.file} has no such key to revoke: {args.key!r}", param="key")
        draft.revoke(doomed)
        draft.write()
    print(f"revoked: {', '.join(f'{record.name} {record.fingerprint}' for record in doomed)}")
    return 0


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
    text, accepted = text_of(path), []
    for kind, limits in KINDS.items():
        with suppress(ConfigError):
            parse_key_file(text, limits)
            accepted.append(kind)
    return accepted or ["server"]


def _date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--expires is {text!r}; accepted: a day, as 2027-01-31", param="expires") from None


def _shown(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
