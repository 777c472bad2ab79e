"""The key of a request: read from its header, looked up, and checked for its roles and its end."""

from __future__ import annotations

from typing import TypeVar

from fovea.access.keyfile import digest
from fovea.access.keys import Key, Keys
from fovea.core.errors import Unauthorized

L = TypeVar("L")


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
