"""Decides for every request whether its key opens its route, and who its client is.

Keys can change while the server runs (`access.table`).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fovea.access.audit import Audit
from fovea.access.key_table import KeyTable
from fovea.access.keys import Key, KeyFile, Keys, find_key, fingerprint, hash_of_key
from fovea.access.log import AccessLog
from fovea.core.errors import ConfigError, Unauthorized
from fovea.http.browsers import Browsers
from fovea.http.page import is_page
from fovea.server.clients import ANYONE, Caller, Client, Limits

if TYPE_CHECKING:
    from fovea.server.settings import ServerSettings


OPEN = ("/health", "/ping", "/ready", "/v2/health/live", "/v2/health/ready")
DOCS = ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
METRICS = "/metrics"
VERSION = "/version"
ADMIN = "/admin"
LIVE = f"{ADMIN}/live"
PEERS = "/peer/"
ANY = frozenset(("api", "admin", "metrics"))
NOUNS = {"metrics": "metrics key", "admin": "admin key", "api": "API key"}


def is_limited(path: str) -> bool:
    """Whether requests to a path count towards the limits per minute of their client."""
    return path.startswith("/v1/") or path in ("/tokenize", "/detokenize", "/invocations")


def is_poll(method: str, path: str) -> bool:
    """Whether a request only asks how far a batch is, or ends it. These do not count towards a rate."""
    own = path.startswith(("/v1/batches/", "/v1/files/")) or path in ("/v1/batches", "/v1/files")
    return own and (method in ("GET", "DELETE") or path.endswith("/cancel"))


def is_measured(path: str) -> bool:
    """Whether the metrics count the requests to a path.

    Probes, scrapes and the calls of the page for operators, which come every second, are not counted.
    """
    return is_limited(path) or (path.startswith(f"{ADMIN}/") and path != LIVE)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one server.

    api, admin, metrics: whether there are keys of this role. A keys file counts as all three, whatever it
        holds: no route opens when the last key of a role is removed from it.
    open_metrics: whether /metrics needs no key.
    docs: on, off or key.
    page: whether there are pages at / and /admin. Their files are the same for everyone and hold no secrets.
    """

    api: bool = False
    admin: bool = False
    metrics: bool = False
    open_metrics: bool = False
    docs: str = "key"
    page: bool = False

    def roles(self, path: str) -> frozenset[str]:
        """Return the roles that open a path; a key needs one of them. Empty: the path is open to all."""
        if path in OPEN or path.startswith(PEERS) or (self.page and is_page(path)):
            return frozenset()
        if path == METRICS:
            return self._metrics_roles()
        if path == ADMIN or path.startswith(f"{ADMIN}/"):
            return frozenset(("admin",)) if self.admin else self._api_roles()
        if path in DOCS and self.docs == "on":
            return frozenset()
        if path in DOCS or path == VERSION:
            return ANY if self.api else frozenset()
        return self._api_roles()

    def _metrics_roles(self) -> frozenset[str]:
        if self.open_metrics:
            return frozenset()
        if self.admin or self.metrics:
            return frozenset(("metrics", "admin"))
        return self._api_roles()

    def _api_roles(self) -> frozenset[str]:
        return frozenset(("api",)) if self.api else frozenset()


def noun(roles: frozenset[str]) -> str:
    """Name the kind of key that one of these roles needs."""
    if roles == ANY:
        return "key"
    return next(text for role, text in NOUNS.items() if role in roles)


log = logging.getLogger("fovea.server")


class Access:
    """The keys, clients, rules and logs of one server.

    rules: which keys open which routes.
    fair: whether a client leaves places to others: there are several, and no fixed number of places per key.
    usual_places: places of a client without a limit of its own; 0: no fixed number.

    Raises ConfigError if the keys file or the access log cannot be used.
    """

    def __init__(
        self,
        settings: ServerSettings,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        access = settings.access
        self.usual_places = access.max_places_per_key
        self.audit = Audit(clock)
        self.log = AccessLog(access.access_log)
        file = access.keys_file is not None
        self.rules = Rules(
            api=bool(settings.api_keys) or file,
            admin=bool(settings.admin_keys) or file,
            metrics=bool(access.metrics_keys) or file,
            open_metrics=access.open_metrics,
            docs=access.docs,
            page=access.page == "on",
        )
        self._peer = hashlib.sha256(settings.peer_key.encode()).digest() if settings.peer_key else b""
        self._browsers = Browsers(settings.http.server_names, access.cors_origins)
        self._scoped = settings.cache_scope == "key"
        self._clock, self._now = clock, now
        self._clients: dict[str, Client] = {}
        self._anyone = Client(ANYONE)
        self._shares: dict[str, float] = {}
        self._table = KeyTable(
            access.keys_file,
            Limits,
            api=settings.api_keys,
            admin=settings.admin_keys,
            metrics=access.metrics_keys,
            check=self._check_shares,
            log=log,
        )
        self._use(self._table.keys)

    @property
    def fair(self) -> bool:
        return not self.usual_places and self._api_clients > 1

    def refuse_other_sites(self, scope: Mapping[str, Any]) -> None:
        """Refuse what a page of another site made a browser send, if there are no keys that keep it out.

        scope: the ASGI scope of the request. Probes are never refused.
        Raises Forbidden.
        """
        path = scope["path"]
        if not self.rules.api and path not in OPEN and not path.startswith(PEERS):
            self._browsers.check(scope, page=is_page(path) or path in DOCS)

    def authenticate(self, path: str, authorization: bytes, caller: Caller) -> None:
        """Check the key of a request.

        authorization: the header.
        caller: gets client, tenant and fingerprint.
        Raises Unauthorized if the path needs a key and the header has none that opens it.
        """
        if path.startswith(PEERS):
            self._check_peer(authorization, caller)
        roles = self.rules.roles(path)
        if roles:
            key = self._key(authorization, roles, caller)
            caller.client = self._clients[key.name]
            caller.tenant = key.tenant if self._scoped else ""
            caller.holder = key.tenant
        else:
            caller.client.totals = self._anyone.totals

    def caller_of(self, holder: str) -> Caller | None:
        """Return a caller by its `holder`, "" without keys; None: none of its keys is left."""
        if not self.rules.api:
            caller = Caller()
            caller.client.totals = self._anyone.totals
            return caller if not holder else None
        keys = (key for key in self._table.keys if key.tenant == holder and "api" in key.roles)
        key = next((key for key in keys if key.expires is None or self._now() < key.expires), None)
        if key is None:
            return None
        return Caller(self._clients[key.name], key.tenant if self._scoped else "", holder=holder)

    @property
    def clients(self) -> list[Client]:
        """The clients whose keys open /v1; without such keys, the one client of all requests."""
        if not self.rules.api:
            return [self._anyone]
        names = dict.fromkeys(key.name for key in self._table.keys if "api" in key.roles)
        return [self._clients[name] for name in names]

    def stats(self) -> dict[str, float]:
        """Figures by the names of `observe.table`."""
        return {"keys": len(self._table.keys), "keys_file_broken": float(self._table.broken)}

    def share_of(self, tenant: str) -> float:
        """Return the part of each cache that the entries of a tenant may fill; 1 for an unknown one."""
        return self._shares.get(tenant, 1.0)

    def reload(self) -> bool:
        """Read the keys file if it has changed. Returns whether other keys are used now.

        A file that cannot be used is logged, and the keys stay what they were.
        """
        if not self._table.reload():
            return False
        self._use(self._table.keys)
        return True

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look after the keys file and the audit log until the block ends."""
        async with self._table.watching(self._use, self.audit.flush):
            yield
        self.audit.flush(final=True)
        self.log.close()

    def _check_shares(self, file: KeyFile[Limits]) -> None:
        for record in file.records:
            if record.limits.cache_share < 1 and not self._scoped:
                raise ConfigError(
                    f"key {record.name!r}: cache_share is {record.limits.cache_share:g}, but the clients "
                    "share the caches; accepted: 1, or cache_scope key",
                    param="keys_file",
                )

    def _use(self, keys: Keys[Limits]) -> None:
        """Use these keys. Clients that stay keep what they have used of their limits."""
        limits: dict[str, Limits] = {key.name: key.limits for key in keys}
        for name, values in limits.items():
            if name in self._clients:
                self._clients[name].change_limits(values)
            else:
                self._clients[name] = Client(name, values, self._clock)
        for name in self._clients.keys() - limits.keys():
            del self._clients[name]
        self._shares = {key.tenant: key.limits.cache_share for key in keys}
        self._api_clients = len({key.name for key in keys if "api" in key.roles})

    def _check_peer(self, authorization: bytes, caller: Caller) -> None:
        """Check the key of another engine. Raises Unauthorized."""
        hashed = hash_of_key(authorization, self._table.longest, "peer key")
        caller.fingerprint = fingerprint(hashed)
        if not self._peer or not hmac.compare_digest(hashed, self._peer):
            raise Unauthorized("the peer key is wrong; it is peer_key in the settings of all peers")

    def _key(self, authorization: bytes, roles: frozenset[str], caller: Caller) -> Key[Limits]:
        kind = noun(roles)
        hashed = hash_of_key(authorization, self._table.longest, kind)
        caller.fingerprint = fingerprint(hashed)
        return find_key(self._table.keys, hashed, roles, kind, self._now())
