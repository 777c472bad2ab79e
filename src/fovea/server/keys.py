"""Who may ask for what, by the key that comes with a request, and whose share of the caches that is."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from fovea.core.errors import Unauthorized
from fovea.server.settings import ServerSettings

ADMIN = "/admin/"
PROTECTED = ("/v1/", "/tokenize", ADMIN)


class Keys:
    def __init__(self, settings: ServerSettings) -> None:
        self._api = _encoded(settings.api_keys)
        self._admin = _encoded(settings.admin_keys)
        self._scoped = settings.cache_scope == "key"

    def admit(self, path: str, header: bytes) -> str:
        """The tenant that asks, "" where all share the caches. header: Authorization. Raises Unauthorized."""
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
    """32 hex digits that tell keys apart and not what they are. The same after a restart, as the disk tier is."""
    return hmac.digest(key, b"fovea cache scope", "sha256").hex()[:32]


def _encoded(keys: Iterable[str]) -> list[bytes]:
    return [key.strip().encode() for key in keys]


def _matches(key: bytes, known: Sequence[bytes]) -> bool:
    """Every key is compared, so that the time taken tells nothing about which one nearly matched."""
    return sum(hmac.compare_digest(key, each) for each in known) > 0
