"""Keys that open a server or a gateway: their names, roles and limits, the file that holds their hashes, and
the header that carries one.

The keys file is TOML that lists the hashes of keys with the limits of their clients:

    cache_secret = "..."                # optional: names the clients' parts of the caches

    [default]                           # limits of keys that state none of their own
    requests_per_minute = 60

    [[key]]
    name = "alice"                      # keys of one name belong to one client and share its limits
    hash = "sha256:9f86d0..."           # SHA-256 of the key, in hex
    roles = ["api"]                     # api, admin, metrics; default: api
    requests_per_minute = 600
    expires = 2027-01-31                # refused from then on (UTC)

A plain SHA-256 protects a key only because `new_key` draws it from 2^256: nobody can guess it and compare.
The hash of a password would be found within hours.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

from fovea.core.config_files import TomlFile, check_keys, errors_in, parse_toml
from fovea.core.errors import ConfigError, Unauthorized
from fovea.core.findings import Findings
from fovea.core.private_files import exposure
from fovea.core.settings import settings_of

L = TypeVar("L")
"""The settings class of the limits that a keys file states; its defaults limit nothing."""
ROLES = ("api", "admin", "metrics")
PREFIX = "sha256:"
LARGEST_FILE = 16 * 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_OWN_FIELDS = ("name", "hash", "roles", "expires")


@dataclass(frozen=True, slots=True)
class KeyRecord(Generic[L]):
    """One key of the file.

    name: name of its client.
    digest: SHA-256 of the key, 32 bytes.
    roles: routes that it opens.
    expires: seconds of the epoch from which it is refused; None: never.
    """

    name: str
    digest: bytes = field(repr=False)
    roles: frozenset[str]
    limits: L
    expires: float | None = None

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.digest)


@dataclass(frozen=True, slots=True)
class KeyFile(Generic[L]):
    """The contents of a keys file."""

    records: tuple[KeyRecord[L], ...] = ()
    cache_secret: str = field(default="", repr=False)


def new_key() -> str:
    """Return a random key of 256 bits."""
    return f"fv-{secrets.token_urlsafe(32)}"


def digest(key: bytes) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key).digest()


def fingerprint(digest: bytes) -> str:
    """Return the first 8 hex digits of a key's hash, which name the key in logs and lists."""
    return digest.hex()[:8]


def check_private(path: Path) -> None:
    """Check that no other user can change a keys file. Links are followed.

    Raises ConfigError if another user than this one and root owns the file or a folder above it, or may write
    to one of them.
    """
    reason = exposure(path, may_be_link=True)
    if reason is not None:
        raise ConfigError(
            f"keys file {path}: another user could add keys: {reason}; accepted: a file and folders that "
            "belong to this user or to root, and that nobody else may write to",
            param="keys_file",
        )


def read_key_file(path: Path, limits: type[L]) -> KeyFile[L]:
    """Read a keys file. A server also needs `check_private`.

    limits: the settings class of the limits that it states.

    Raises ConfigError if it cannot be read, if others than its owner may write to it, or if its content is
    wrong.
    """
    try:
        with path.open("rb") as file:
            _check_mode(path, file)
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"keys file {path} cannot be read: {error.strerror}", param="keys_file") from error
    if len(data) > LARGEST_FILE:
        raise ConfigError(
            f"keys file {path} is too large; accepted: at most {LARGEST_FILE} bytes", param="keys_file"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"keys file {path}: {error}", param="keys_file") from error
    with TomlFile({}, path, text, "keys file").errors():
        return parse_key_file(text, limits)


def parse_key_file(text: str, limits: type[L]) -> KeyFile[L]:
    """Parse the text of a keys file. Raises ConfigError with all errors, each with the key of its entry."""
    reader = _Reader(limits)
    values = parse_toml(text, "it")
    findings = Findings()
    with findings.part():
        check_keys("the file", values, ("cache_secret", "default", "key"), "field")
    secret, default, entries = (
        values.get("cache_secret", ""),
        values.get("default", {}),
        values.get("key", []),
    )
    if not isinstance(default, dict) or not isinstance(entries, list):
        raise ConfigError(
            "default or key is not a table; accepted: a table [default], and a table [[key]] for every key"
        )
    with findings.part():
        if not isinstance(secret, str):
            raise ConfigError(
                'cache_secret is not a text; accepted: a text in quotes, as cache_secret = "..."',
                param="cache_secret",
            )
    with findings.part("default"):
        check_keys("[default]", default, reader.names, "field")
        reader.limits(default, "[default]")
    if findings.errors:
        default = {}  # it would add its errors to those of every key
    records = []
    for number, entry in enumerate(entries, 1):
        with findings.part("key", number):
            records.append(reader.record(entry, default, f"[[key]] number {number}"))
    findings.check()
    _check_together(records)
    return KeyFile(tuple(records), str(secret))


class _Reader(Generic[L]):
    """Reads the tables of a keys file.

    names: the names of the limits.
    """

    def __init__(self, limits: type[L]) -> None:
        self._make = limits
        self.names = tuple(entry.name for entry in settings_of(limits))

    def record(self, entry: Any, default: dict[str, Any], where: str) -> KeyRecord[L]:
        if not isinstance(entry, dict):
            raise ConfigError(f"{where} is not a table")
        name = entry.get("name")
        with errors_in(where):
            name = check_name(name)
        where, findings = f"key {name!r}", Findings()
        with findings.part():
            check_keys(where, entry, (*_OWN_FIELDS, *self.names), "field")
        hashed, roles = entry.get("hash"), entry.get("roles", ["api"])
        with findings.part():
            _check_hash(hashed, where)
        with findings.part():
            _check_roles(roles, where)
        own = {key: value for key, value in entry.items() if key in self.names}
        with findings.part():
            limits = self.limits(default | own, where)
        with findings.part():
            expires = _expires(entry.get("expires"), where)
        findings.check()
        code = bytes.fromhex(str(hashed).removeprefix(PREFIX))
        return KeyRecord(name, code, frozenset(roles), limits, expires)

    def limits(self, values: dict[str, Any], where: str) -> L:
        """Return the limits with these values. Lists become tuples. Raises ConfigError."""
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        with errors_in(where):
            return self._make(**given)


def check_name(name: Any) -> str:
    """Return a value that can be the name of a client. Raises ConfigError for others."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"name is {repr(name)[:100]}; accepted: 1 to 64 letters, digits, dots, hyphens, underscores "
            "and @",
            param="name",
        )
    return name


def _check_hash(value: Any, where: str) -> None:
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise ConfigError(
            f"{where}: hash is not {PREFIX} and 64 hex digits; `fovea keys new` prints it", param="hash"
        )


def _check_roles(value: Any, where: str) -> None:
    if not isinstance(value, list) or not value or any(role not in ROLES for role in value):
        raise ConfigError(
            f"{where}: roles is {value!r}; accepted: a list of {', '.join(ROLES)}", param="roles"
        )


def _expires(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            raise ConfigError(
                f"{where}: expires has no time zone; accepted: 2027-01-31T12:00:00Z or 2027-01-31",
                param="expires",
            )
        return value.timestamp()
    if isinstance(value, datetime.date):
        midnight = datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.UTC)
        return midnight.timestamp()
    raise ConfigError(
        f"{where}: expires is {value!r}; accepted: a date or a time of TOML, without quotes", param="expires"
    )


def _check_together(records: Sequence[KeyRecord[L]]) -> None:
    """Raise ConfigError if a key is listed twice, or if keys of one client state different limits."""
    digests: set[bytes] = set()
    limits: dict[str, L] = {}
    for record in records:
        if record.digest in digests:
            raise ConfigError(f"key {record.name!r}: the hash {record.fingerprint}... is listed twice")
        digests.add(record.digest)
        if limits.setdefault(record.name, record.limits) != record.limits:
            raise ConfigError(
                f"key {record.name!r} is listed with different limits; keys of one name share their limits"
            )


def _check_mode(path: Path, file: BinaryIO) -> None:
    mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"keys file {path} has mode {mode:o}: others than its owner may write to it and add keys; "
            "accepted: 600 (chmod 600)",
            param="keys_file",
        )


LONGEST_KEY = 512


class Key(NamedTuple, Generic[L]):
    """A key that a request may use.

    digest: SHA-256 of the key.
    name: name of its client. A key of a flag has a name with a colon, which the keys file cannot contain.
    roles: api, admin, metrics.
    tenant: name of the client's part of the caches if they are separated by keys.
    expires: seconds of the epoch from which the key is refused; None: never.
    """

    digest: bytes
    name: str
    roles: frozenset[str]
    limits: L
    tenant: str
    expires: float | None = None


class Keys(Generic[L]):
    """An immutable table of keys. The time of a lookup does not tell which keys are similar.

    The table is indexed by a hash under a secret of this process. Nobody outside can choose a key whose index
    resembles that of another one. So a comparison that ends early tells nothing, and a wrong key costs the
    same however many keys there are.
    """

    def __init__(self, keys: Iterable[Key[L]]) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys: dict[bytes, Key[L]] = {}
        for key in keys:
            index = self._index(key.digest)
            known = self._keys.get(index)
            # One text may be an API key and an admin key at once.
            self._keys[index] = key if known is None else known._replace(roles=known.roles | key.roles)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key[L]]:
        return iter(self._keys.values())

    def find(self, hashed: bytes) -> Key[L] | None:
        """Return the key with this SHA-256, expired or not. None: there is none."""
        key = self._keys.get(self._index(hashed))
        return key if key is not None and hmac.compare_digest(key.digest, hashed) else None

    def _index(self, hashed: bytes) -> bytes:
        return hmac.digest(self._secret, hashed, "sha256")


def keys_of_flags(
    api: Iterable[str], admin: Iterable[str], metrics: Iterable[str], limits: L
) -> Iterator[Key[L]]:
    """Yield the keys of --api-key, --admin-key and --metrics-key, named by position.

    limits: the limits of all of them.
    """
    for role, texts in (("api", api), ("admin", admin), ("metrics", metrics)):
        for number, text in enumerate(texts, 1):
            key = text.strip().encode()
            yield Key(digest(key), f"{role}-key:{number}", frozenset((role,)), limits, tenant_of_key(key))


def keys_of_file(file: KeyFile[L]) -> Iterator[Key[L]]:
    """Yield the keys of a keys file."""
    for record in file.records:
        tenant = tenant_of_client(record.name, file.cache_secret)
        yield Key(record.digest, record.name, record.roles, record.limits, tenant, record.expires)


def tenant_of_key(key: bytes) -> str:
    """A name for the owner of a key of a flag: 32 hex digits, from which the key cannot be computed.

    It is the same after a restart, so that entries in the disk tier stay usable.
    """
    return hmac.digest(key, b"fovea cache scope", "sha256").hex()[:32]


def tenant_of_client(name: str, secret: str) -> str:
    """A name for the part of the caches that belongs to a client of the keys file: 32 hex digits.

    It depends on the client's name and not on its key, so that the caches stay usable when the key is
    replaced.

    secret: the file's `cache_secret`. Without it, whoever knows the client's name and reads the folder of the
        disk tier can find out whether an image is in it.
    """
    return hmac.digest(b"fovea client " + secret.encode(), name.encode(), "sha256").hex()[:32]


def hash_of_key(authorization: bytes, longest: int, kind: str) -> bytes:
    """Return the SHA-256 of the key in the header `Authorization: Bearer KEY`.

    longest: bytes of the longest key that exists. A longer one is refused without hashing it.
    kind: the kind of key in words, such as "API key".
    Raises Unauthorized if there is no key or if it is too long.
    """
    scheme, _, text = authorization.partition(b" ")
    text = text.strip()
    if scheme.lower() != b"bearer" or not text:
        article = "an" if kind[0] in "aA" else "a"
        raise Unauthorized(f"{article} {kind} is required: Authorization: Bearer KEY", code="missing_api_key")
    if len(text) > longest:
        raise _wrong(kind)
    return digest(text)


def find_key(keys: Keys[L], hashed: bytes, roles: frozenset[str], kind: str, now: float) -> Key[L]:
    """Return the key with this SHA-256.

    roles: the key needs one of them.
    now: seconds of the epoch.
    Raises Unauthorized if there is no such key, if it has none of the roles, or if it has expired.
    """
    key = keys.find(hashed)
    if key is None or not key.roles & roles:
        raise _wrong(kind)
    if key.expires is not None and now >= key.expires:
        raise Unauthorized("the key has expired", code="expired_api_key")
    return key


def _wrong(kind: str) -> Unauthorized:
    return Unauthorized(f"the {kind} is not valid here")
