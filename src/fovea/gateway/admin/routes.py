"""The routes below /admin of a gateway. They need an admin key, if there are any keys.

A drain holds for the worker that takes the request and, over the file that all share, for the others. Changes
are lines of the audit log.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

from fovea.access.keys import fingerprint, hash_of_key
from fovea.core.errors import ConfigError, Forbidden, InvalidRequest, NotFound, Unauthorized
from fovea.gateway.admin import figures
from fovea.gateway.admin.keys import KeyDesk, Operator
from fovea.gateway.generate.request import Services
from fovea.gateway.inspect.body import Body
from fovea.http.exchange import Exchange
from fovea.http.refusals import MethodNotAllowed
from fovea.observe.py_spy import FORMATS, ProfileOptions, Profiler

ADMIN = frozenset(("admin",))
CREATED = 201
LONGEST_SHOWN = 100
_NAME = re.compile(r"\bNAME\b|\bFINGERPRINT\b")
Handler = Callable[..., Awaitable[None]]
Reload = Callable[[], Awaitable[str]]


class Administration:
    """Serves requests below /admin.

    table: the routes: method, path with names in capitals, and what serves them.
    """

    def __init__(self, services: Services, reload: Reload) -> None:
        self._services = services
        self._reload = reload
        self._profiler = Profiler()
        self._turn = asyncio.Lock()
        table: tuple[tuple[str, str, Handler], ...] = (
            ("GET", "/admin/live", self._live),
            ("GET", "/admin/backends", self._backends),
            ("POST", "/admin/backends/NAME/drain", self._drain),
            ("POST", "/admin/backends/NAME/undrain", self._undrain),
            ("GET", "/admin/tenants", self._tenants),
            ("PATCH", "/admin/tenants/NAME", self._limit),
            ("GET", "/admin/keys", self._keys),
            ("POST", "/admin/keys", self._create_key),
            ("PATCH", "/admin/keys/FINGERPRINT", self._change_key),
            ("DELETE", "/admin/keys/FINGERPRINT", self._revoke_key),
            ("GET", "/admin/usage", self._usage),
            ("GET", "/admin/experiments", self._experiments),
            ("POST", "/admin/reload", self._read_again),
            ("POST", "/admin/cache/clear", self._clear_cache),
            ("GET", "/admin/slow", self._slow),
            ("GET", "/admin/profile", self._profile),
        )
        self.table = table
        self._patterns: list[tuple[str, re.Pattern[str], Handler]] = [
            (method, _pattern(path), call) for method, path, call in table
        ]

    async def answer(self, exchange: Exchange) -> None:
        """Answer a request. Raises Unauthorized, Forbidden, NotFound, MethodNotAllowed and others."""
        operator = self._operator(exchange)
        allowed: list[str] = []
        for method, pattern, call in self._patterns:
            if (found := pattern.fullmatch(exchange.path)) is not None:
                if method == exchange.method:
                    await call(exchange, operator, *found.groups())
                    return
                allowed.append(method)
        shown = exchange.path[:LONGEST_SHOWN]
        if allowed:
            accepted = ", ".join(allowed)
            raise MethodNotAllowed(
                f"{exchange.method} is not accepted at {shown}; accepted: {accepted}", allow=tuple(allowed)
            )
        known = ", ".join(f"{method} {path}" for method, path, _ in self.table)
        raise NotFound(f"there is no route {exchange.method} {shown}; accepted: {known}", code="unknown_url")

    def _operator(self, exchange: Exchange) -> Operator:
        """Check the key of a request, and return who asks. A refusal is a line of the audit log."""
        tenants = self._services.tenants
        try:
            if not tenants.open and not tenants.has("admin"):
                raise Forbidden(
                    "/admin is closed, because there are API keys and no admin key; accepted: --admin-key, "
                    "or FOVEA_ADMIN_KEY, at the gateway's start",
                    code="no_admin_key",
                )
            key = tenants.authenticate(exchange.headers.get(b"authorization", b""), ADMIN)
        except (Unauthorized, Forbidden) as error:
            self._services.records.audit.refused(
                error.status,
                error.code,
                exchange.address,
                exchange.path,
                _fingerprint(exchange),
                exchange.request_id,
            )
            raise
        return Operator(key.name, key.fingerprint, exchange.address, exchange.request_id)

    @property
    def _desk(self) -> KeyDesk:
        records = self._services.records
        return KeyDesk(self._services.tenants, records.audit, records.now, self._turn)

    async def _body(self, exchange: Exchange, operator: Operator) -> dict[str, Any]:
        return Body.parse(await exchange.receive_json(self._services.bodies, operator.name)).resolved({})

    def _note(self, operator: Operator, event: str, what: str) -> None:
        """Write a line of the audit log about an action."""
        records = self._services.records
        who = {"by": operator.name, "by_key": operator.fingerprint, "address": operator.address}
        records.audit.changed(records.now(), {"event": event, **who, "id": operator.request_id, "name": what})

    async def _live(self, exchange: Exchange, operator: Operator) -> None:
        """Report load, queues and backends of this worker, and sums of all workers."""
        await exchange.reply_json(await figures.live(self._services), headers=NO_STORE)

    async def _backends(self, exchange: Exchange, operator: Operator) -> None:
        """List all backends with their health, load and breakers."""
        now = self._services.clock()
        rows = [figures.backend_values(one, now) for one in self._services.fleet]
        await exchange.reply_json({"backends": rows})

    async def _drain(self, exchange: Exchange, operator: Operator, name: str) -> None:
        """Send a backend no new requests; those that run go on."""
        await self._set_drain(exchange, operator, name, drain=True)

    async def _undrain(self, exchange: Exchange, operator: Operator, name: str) -> None:
        """Send a backend requests again, few at first."""
        await self._set_drain(exchange, operator, name, drain=False)

    async def _set_drain(self, exchange: Exchange, operator: Operator, name: str, *, drain: bool) -> None:
        services = self._services
        backend = services.fleet.get(name)
        if backend is None:
            known = ", ".join(one.name for one in services.fleet)
            raise NotFound(
                f"there is no backend {name[:LONGEST_SHOWN]!r}; known: {known or 'none'}",
                code="unknown_backend",
            )
        services.drains.set(name, drain=drain)
        services.drains.apply(services.fleet, services.clock())
        self._note(operator, "backend_drained" if drain else "backend_undrained", name)
        await exchange.reply_json(figures.backend_values(backend, services.clock()))

    async def _tenants(self, exchange: Exchange, operator: Operator) -> None:
        """List the tenants with their limits, and what they have used of them."""
        await exchange.reply_json(await figures.tenants(self._services), headers=NO_STORE)

    async def _limit(self, exchange: Exchange, operator: Operator, name: str) -> None:
        """Change limits of a tenant: {"limits": {"requests_per_minute": 60}}; null: the usual value."""
        await exchange.reply_json(
            await self._desk.limit(operator, name, await self._body(exchange, operator))
        )

    async def _keys(self, exchange: Exchange, operator: Operator) -> None:
        """List the keys by fingerprint, with roles and ends, and the limits that there are."""
        await exchange.reply_json(self._desk.listed(), headers=NO_STORE)

    async def _create_key(self, exchange: Exchange, operator: Operator) -> None:
        """Make a key: {"name", "roles", "expires", "limits"}; only this answer has it."""
        created = await self._desk.create(operator, await self._body(exchange, operator))
        await exchange.reply_json(created, CREATED, NO_STORE)

    async def _change_key(self, exchange: Exchange, operator: Operator, digits: str) -> None:
        """Change roles or the end of a key: {"roles", "expires"}."""
        await exchange.reply_json(
            await self._desk.change(operator, digits, await self._body(exchange, operator))
        )

    async def _revoke_key(self, exchange: Exchange, operator: Operator, digits: str) -> None:
        """Revoke a key."""
        await exchange.reply_json(await self._desk.revoke(operator, digits))

    async def _usage(self, exchange: Exchange, operator: Operator) -> None:
        """Report usage and costs: ?by=day&days=30, by names as tenant,day."""
        await exchange.reply_json(await figures.usage(self._services, exchange.query), headers=NO_STORE)

    async def _experiments(self, exchange: Exchange, operator: Operator) -> None:
        """Report the experiments: arms, their shares and results, and the verdicts."""
        await exchange.reply_json(await figures.experiments(self._services), headers=NO_STORE)

    async def _read_again(self, exchange: Exchange, operator: Operator) -> None:
        """Read the configuration file now."""
        try:
            changes = await self._reload()
        except ConfigError as error:
            raise InvalidRequest(
                f"the configuration stays what it was: {error.message}", param=error.param, code="bad_config"
            ) from error
        self._note(operator, "reloaded", changes)
        await exchange.reply_json({"reloaded": changes})

    async def _clear_cache(self, exchange: Exchange, operator: Operator) -> None:
        """Remove all cached answers."""
        if self._services.cache is None:
            raise InvalidRequest("the response cache is turned off", code="no_cache")
        removed = await self._services.cache.clear()
        self._note(operator, "cache_cleared", "")
        await exchange.reply_json({"removed": removed})

    async def _slow(self, exchange: Exchange, operator: Operator) -> None:
        """List the latest slow requests of this worker."""
        await exchange.reply_json({"requests": self._services.records.slow.rows()})

    async def _profile(self, exchange: Exchange, operator: Operator) -> None:
        """Profile this worker for some seconds with py-spy, as a flame graph or in another format."""
        options = ProfileOptions.of(exchange.query)
        exchange.watch()
        recording = await self._profiler.profile(options)
        kind = {"content-type": FORMATS[options.form], "content-length": str(len(recording))}
        await exchange.reply(200, recording, {**kind, **NO_STORE})


NO_STORE = {"cache-control": "no-store"}


def _pattern(path: str) -> re.Pattern[str]:
    """Return the expression of a path. Names of backends may have slashes."""
    return re.compile(_NAME.sub("(.+)", path), re.DOTALL)


def _fingerprint(exchange: Exchange) -> str:
    """Return the fingerprint of the key that was sent; "-": none."""
    try:
        return fingerprint(hash_of_key(exchange.headers.get(b"authorization", b""), 512, "key"))
    except Unauthorized:
        return "-"
