"""All keys of a server in one table, and the part of the caches that belongs to each."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from fovea.access.keyfile import KeyFile, digest

LONGEST_KEY = 512
L = TypeVar("L")


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
