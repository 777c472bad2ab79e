"""The tenants of a gateway: the owner of a request's key, and the limits that the keys file sets for it."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fovea.access.key_table import KeyTable
from fovea.access.keys import Key, Keys, find_key, fingerprint, hash_of_key
from fovea.core.errors import NotFound
from fovea.core.settings import check_settings, setting
from fovea.gateway.tenants.account import MILLIONTHS, NO_BOUNDS, Bounds

SCOPES = ("tenant", "shared")
_MOST = 100_000_000_000
_LEAST_COST = 0.000001
_MOST_COST = 1_000_000_000.0
log = logging.getLogger("fovea.gateway")
API = frozenset(("api",))
NOUNS = {API: "API key", frozenset(("admin",)): "admin key"}


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits and budgets that all keys of one tenant share. The defaults limit nothing.

    bounds: the limits as numbers in the units of `Amounts`.
    """

    requests_per_minute: int = setting(
        0, "Requests per minute. As many may come at once. 0: no limit.", low=0, high=10_000_000
    )
    text_tokens_per_minute: int = setting(
        0,
        "Tokens of text, of prompts and answers together, per minute. As many may come at once. 0: no limit.",
        low=0,
        high=1_000_000_000,
    )
    visual_tokens_per_minute: int = setting(
        0,
        "Tokens of images and videos per minute. As many may come at once. 0: no limit.",
        low=0,
        high=1_000_000_000,
    )
    cost_per_minute: float = setting(
        0.0,
        "Cost per minute, in the currency of the price table, to the millionth. 0: no limit.",
        low=_LEAST_COST,
        high=_MOST_COST,
        or_zero=True,
    )
    requests_per_day: int = setting(0, "Requests of a UTC day. 0: no limit.", low=0, high=_MOST)
    text_tokens_per_day: int = setting(0, "Tokens of text of a UTC day. 0: no limit.", low=0, high=_MOST)
    visual_tokens_per_day: int = setting(
        0, "Tokens of images and videos of a UTC day. 0: no limit.", low=0, high=_MOST
    )
    cost_per_day: float = setting(
        0.0, "Cost of a UTC day. 0: no limit.", low=_LEAST_COST, high=_MOST_COST, or_zero=True
    )
    cost_per_month: float = setting(
        0.0, "Cost of a UTC month. 0: no limit.", low=_LEAST_COST, high=_MOST_COST, or_zero=True
    )
    max_in_flight: int = setting(0, "Requests in flight at one time. 0: no limit.", low=0, high=1_000_000)
    weight: float = setting(
        1.0, "Part in the fair queue, relative to the weights of other tenants.", low=0.01, high=100
    )
    priority: int = setting(
        0, "Priority of the tenant's requests; smaller ones are served first.", low=-1000, high=1000
    )
    models: tuple[str, ...] = setting((), "Models or aliases that the tenant may name. Empty: all.")
    response_cache: bool = setting(True, "Whether answers are kept in, and read from, the cache of answers.")
    cache_scope: str = setting(
        "tenant",
        "Who shares cached answers. tenant: only the keys of this tenant; shared: all tenants that say so.",
        choices=SCOPES,
    )
    max_visual_tokens: int = setting(
        0, "Tokens of images and videos of one request. 0: no limit.", low=0, high=1_000_000_000
    )
    answer_tokens: int = setting(
        1024,
        "Tokens. max_tokens that the gateway writes into a request without one, and reserves, if the tenant "
        "has a limit of text tokens or costs. At most 16 for /v1/completions.",
        low=1,
        high=1_000_000,
    )
    bounds: Bounds = field(default=NO_BOUNDS, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_settings(self)
        bounds = Bounds(
            (
                self.requests_per_minute,
                self.text_tokens_per_minute,
                self.visual_tokens_per_minute,
                round(self.cost_per_minute * MILLIONTHS),
            ),
            (
                self.requests_per_day,
                self.text_tokens_per_day,
                self.visual_tokens_per_day,
                round(self.cost_per_day * MILLIONTHS),
            ),
            round(self.cost_per_month * MILLIONTHS),
            self.max_in_flight,
        )
        object.__setattr__(self, "bounds", NO_BOUNDS if bounds == NO_BOUNDS else bounds)

    @property
    def counted(self) -> bool:
        """Whether an account has to be kept. Without one, a request costs nothing."""
        return self.bounds is not NO_BOUNDS

    @property
    def bounds_answers(self) -> bool:
        """Whether answers count: there is a limit of text tokens or of costs."""
        minute, day = self.bounds.minute, self.bounds.day
        return any((minute[1], minute[3], day[1], day[3], self.bounds.month_cost))

    @property
    def most_text(self) -> float:
        """Tokens of text that one request may have at most; 0: any number."""
        return min((limit for limit in (self.bounds.minute[1], self.bounds.day[1]) if limit), default=0)

    def allows(self, model: str) -> bool:
        """Whether the tenant may name a model or an alias."""
        return not self.models or model in self.models


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True, eq=False)
class Tenant:
    """One tenant, as one of its keys opens it.

    name: a name for logs and messages, never a key; "": everyone, if there are no keys.
    roles: roles of the key: api, admin, metrics.
    scope: the part of the caches that belongs to the tenant; "": the part that tenants share.
    fingerprint: the first digits of the key's hash; "": there is no key.
    """

    name: str
    limits: TenantLimits = NO_LIMITS
    roles: frozenset[str] = API
    scope: str = ""
    fingerprint: str = ""

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
    keys_file: the file of keys; None: there is none.
    """

    def __init__(
        self,
        keys_file: Path | None = None,
        *,
        api_keys: Iterable[str] = (),
        admin_keys: Iterable[str] = (),
        now: Callable[[], float] = time.time,
    ) -> None:
        """Read the keys.

        keys_file: TOML file of hashed keys with their `TenantLimits`; None: no file.
        api_keys, admin_keys: keys of flags, without limits.
        now: returns the seconds of the epoch.
        Raises ConfigError if the file cannot be used.
        """
        self._now, self.keys_file = now, keys_file
        api, admin = tuple(api_keys), tuple(admin_keys)
        given = {"api": api, "admin": admin, "metrics": ()}
        self._closed = frozenset(role for role, keys in given.items() if keys or keys_file is not None)
        self._table = KeyTable(keys_file, TenantLimits, api=api, admin=admin, log=log)
        self.open = "api" not in self._closed
        self._tenants: dict[bytes, Tenant] = {}
        self._use(self._table.keys)

    def authenticate(self, authorization: bytes, roles: frozenset[str] = API) -> Tenant:
        """Return the tenant that owns the key of a request.

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

    async def refresh(self) -> None:
        """Use the keys that the keys file has now. It is read in a thread."""
        if await self._table.refresh():
            self._use(self._table.keys)

    @property
    def keys(self) -> Keys[TenantLimits]:
        """All keys that are valid or have expired."""
        return self._table.keys

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
    return Tenant(key.name, key.limits, key.roles, scope, fingerprint(key.digest))
