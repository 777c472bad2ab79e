"""The tenants of a gateway: whose key a request has, and what that tenant may use."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fovea.access.key_table import KeyTable
from fovea.access.keys import Key, Keys, find_key, hash_of_key
from fovea.core.errors import NotFound
from fovea.gateway.tenants.limits import NO_LIMITS, TenantLimits

log = logging.getLogger("fovea.gateway")
API = frozenset(("api",))
NOUNS = {API: "API key", frozenset(("admin",)): "admin key"}


@dataclass(frozen=True, slots=True, eq=False)
class Tenant:
    """One tenant, as one of its keys opens it.

    name: a name for logs and messages, never a key; "": everyone, if there are no keys.
    roles: roles of the key: api, admin, metrics.
    scope: the part of the caches that belongs to the tenant; "": the part that tenants share.
    """

    name: str
    limits: TenantLimits = NO_LIMITS
    roles: frozenset[str] = API
    scope: str = ""

    def check_model(self, model: str) -> None:
        """Raise NotFound if the tenant may not name a model or an alias."""
        if not self.limits.allows(model):
            raise NotFound(
                f"key {self.name!r} may not use the model {model!r}; accepted: "
                f"{', '.join(self.limits.models)}",
                param="model",
                code="model_not_found",
            )


EVERYONE = Tenant("", roles=frozenset(("api", "admin", "metrics")))
"""The only tenant of a gateway without keys."""


class Tenants:
    """All tenants of a gateway, by their keys.

    open: whether there are no API keys, so that everyone may use the gateway. A keys file closes it, whatever
        it holds.
    """

    def __init__(
        self,
        keys_file: Path | None = None,
        *,
        api_keys: Iterable[str] = (),
        admin_keys: Iterable[str] = (),
        metrics_keys: Iterable[str] = (),
        now: Callable[[], float] = time.time,
    ) -> None:
        """Read the keys.

        keys_file: TOML file of hashed keys with their `TenantLimits`; None: no file.
        api_keys, admin_keys, metrics_keys: keys of flags, without limits.
        now: returns the seconds of the epoch.
        Raises ConfigError if the file cannot be used.
        """
        self._now = now
        api, admin, metrics = tuple(api_keys), tuple(admin_keys), tuple(metrics_keys)
        given = {"api": api, "admin": admin, "metrics": metrics}
        self._closed = frozenset(role for role, keys in given.items() if keys or keys_file is not None)
        self._table = KeyTable(
            keys_file,
            TenantLimits,
            api=api,
            admin=admin,
            metrics=metrics,
            log=log,
        )
        self.open = "api" not in self._closed
        self._tenants: dict[bytes, Tenant] = {}
        self._use(self._table.keys)

    def authenticate(self, authorization: bytes, roles: frozenset[str] = API) -> Tenant:
        """Return the tenant to whom the key of a request belongs.

        authorization: the header.
        roles: the key needs one of them. If no key can have one, an API key is needed instead.
        Raises Unauthorized if there is no key, or if it is wrong or has expired.
        """
        roles = roles if roles & self._closed else API
        if self.open and roles is API:
            return EVERYONE
        kind = NOUNS.get(roles, "key")
        hashed = hash_of_key(authorization, self._table.longest, kind)
        key = find_key(self._table.keys, hashed, roles, kind, self._now())
        return self._tenants[key.digest]

    def has(self, role: str) -> bool:
        """Whether keys can have a role, so that those without it are refused."""
        return role in self._closed

    def reload(self) -> bool:
        """Read the keys file if it has changed. Returns whether other keys are used now."""
        if not self._table.reload():
            return False
        self._use(self._table.keys)
        return True

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look after the keys file, in a thread of its own, until the block ends."""
        async with self._table.watching(self._use):
            yield

    def stats(self) -> dict[str, float]:
        """Figures: number of keys, and whether the keys file could not be used at the last look."""
        return {"keys": len(self._table.keys), "keys_file_broken": float(self._table.broken)}

    def _use(self, keys: Keys[TenantLimits]) -> None:
        self._tenants = {key.digest: _tenant(key) for key in keys}


def _tenant(key: Key[TenantLimits]) -> Tenant:
    scope = key.tenant if key.limits.cache_scope == "tenant" else ""
    return Tenant(key.name, key.limits, key.roles, scope)
