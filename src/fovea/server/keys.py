"""API keys: which routes a request may use, and to which tenant of the caches it belongs."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from fovea.core.errors import Unauthorized
from fovea.server.settings import ServerSettings

ADMIN = "/admin/"
PROTECTED = ("/v1/", "/tokenize", ADMIN)


class Keys:
    """The API keys and admin keys of a server."""

    def __init__(self, settings: ServerSettings) -> None:
        self._api = _encoded(settings.api_keys)
        self._admin = _encoded(settings.admin_keys)
        self._scoped = settings.cache_scope == "key"

    def admit(self, path: str, header: bytes) -> str:
        """Check the key of a request and return its tenant; "" if all clients share the caches.

        header: the Authorization header. Raises Unauthorized if the path needs a key and the header has none
            that is valid.
        """
        admin = path.startswith(ADMIN) and bool(self._admin)
        keys = self._admin if admin else self._api
        if not keys or not path.startswith(PROTECTED):
            return ""
        noun = "admin key" if admin else "API key"
        scheme, _, key = header.partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise Unauthorized(f"an {noun} is required: Authorization: Bearer KEY", code="missing_api_key")
        key = key.strip()
        if not _matches(key, keys):
            raise Unauthorized(f"the {noun} is not valid here")
        return tenant_of_key(key) if self._scoped else ""


def tenant_of_key(key: bytes) -> str:
    """A name for the owner of a key: 32 hex digits, from which the key cannot be computed.

    It is the same after a restart, so that entries in the disk tier stay usable.
    """
    return hmac.digest(key, b"fovea cache scope", "sha256").hex()[:32]


def _encoded(keys: Iterable[str]) -> list[bytes]:
    return [key.strip().encode() for key in keys]


def _matches(key: bytes, accepted: Sequence[bytes]) -> bool:
    """Compare with every key, so that the duration does not reveal which one nearly matches."""
    return sum(hmac.compare_digest(key, each) for each in accepted) > 0
