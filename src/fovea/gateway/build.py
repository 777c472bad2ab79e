"""Puts the application of one worker together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fovea import __version__
from fovea.access.audit import Audit
from fovea.core.errors import ConfigError
from fovea.core.names import install_command
from fovea.gateway.app import Gateway
from fovea.gateway.backends.backend import Backend
from fovea.gateway.backends.fleet import EVERY_S, Discovery, Drains, Fleet
from fovea.gateway.backends.route import Router
from fovea.gateway.backends.watch import Watch
from fovea.gateway.breaker import State
from fovea.gateway.cache.cache import open_cache
from fovea.gateway.config import Tables
from fovea.gateway.experiments.config import ExperimentConfig
from fovea.gateway.experiments.experiments import Experiments
from fovea.gateway.generate.dispatch import Dispatcher
from fovea.gateway.generate.experiment import Shadows
from fovea.gateway.generate.records import Records
from fovea.gateway.generate.relay import SilenceWatch
from fovea.gateway.generate.request import Services
from fovea.gateway.generate.upstream import Upstream
from fovea.gateway.inspect.demand import FindRule, VisualCounter
from fovea.gateway.inspect.images import ImageInspector, KnownImages
from fovea.gateway.metrics import Metrics
from fovea.gateway.queues import Queues
from fovea.gateway.settings import GatewaySettings
from fovea.gateway.tenants.accounts import open_accounts
from fovea.gateway.tenants.keys import Tenants
from fovea.gateway.usage.log import UsageLog, UsageStore
from fovea.gateway.usage.prices import PriceTable, read_prices
from fovea.http.bodies import BodyBudget
from fovea.http.browsers import Browsers
from fovea.http.page import read_files
from fovea.media.fetch.fetcher import FetchCache, Fetcher
from fovea.media.fetch.resolve import Resolver
from fovea.observe.request_log import SlowRequests
from fovea.observe.tracer import open_tracer

if TYPE_CHECKING:
    from fovea.gateway.backends.holdings import Followers

log = logging.getLogger("fovea.gateway")
Version = tuple[int, int, int] | None
MIB = 1024 * 1024
FETCH_MIB = 64
"""Ceiling of downloaded images, with remote_images fetch."""
RELOAD_S = 1.0


@dataclass(frozen=True, slots=True)
class Setup:
    """The configuration of a gateway.

    read_tables: reads the tables of the file again; None: there is no file.
    path: the file whose change means a reload.
    find_rule: finds the rule of a model's visual tokens.
    drains: file in which workers share drained backends; None: one worker.
    """

    settings: GatewaySettings
    tables: Tables
    experiments: ExperimentConfig
    find_rule: FindRule
    read_tables: Callable[[], Tables] | None = None
    path: Path | None = None
    drains: Path | None = None


def create_gateway(setup: Setup, clock: Callable[[], float]) -> Gateway:
    """Create the application of one worker, within its event loop's process.

    clock: the event loop's clock, in seconds. Raises ConfigError.
    """
    settings = setup.settings
    if settings.page == "on":
        read_files()
    metrics = Metrics()
    fleet = Fleet(settings.resilience)
    upstream = Upstream(settings.timeouts)
    router = Router(fleet, settings.route, clock)
    dispatcher = Dispatcher(router, upstream, settings.resilience, clock, metrics)
    # Copies are sent once, and take nothing from the retries of users.
    once = replace(settings.resilience, max_attempts=1, retry_share=0.0, hedge_after_s=0.0)
    copies = Dispatcher(router, upstream, once, clock, metrics)
    known = KnownImages()
    limits = settings.media
    fetcher = FetchCache(Fetcher(limits), FETCH_MIB * MIB)
    prices = None if settings.prices is None else read_prices(settings.prices)
    experiments = Experiments(setup.experiments) if setup.experiments.experiments else None
    services = Services(
        settings=settings,
        clock=clock,
        metrics=metrics,
        fleet=fleet,
        upstream=upstream,
        dispatcher=dispatcher,
        inspector=ImageInspector(
            limits,
            settings.remote_images,
            known,
            Resolver(limits.resolve_timeout_s, limits.max_lookups).resolve,
            fetcher.fetch,
        ),
        known=known,
        visual=VisualCounter(setup.find_rule),
        queues=Queues(fleet, settings.route, settings.queue, settings.workers, clock),
        bodies=BodyBudget(settings.max_bodies_mib * MIB, settings.max_body_mib * MIB),
        browsers=Browsers(settings.http.server_names),
        tenants=Tenants(settings.keys_file, api_keys=settings.api_keys, admin_keys=settings.admin_keys),
        accounts=open_accounts(
            replace(
                settings.accounts, accounts_sharers=max(settings.accounts.accounts_sharers, settings.workers)
            )
        ),
        prices=prices,
        cache=open_cache(settings.response_cache, settings.redis),
        experiments=experiments,
        shadows=Shadows(experiments, copies, fleet, prices, clock),
        drains=Drains(setup.drains),
        silence=SilenceWatch(clock, settings.timeouts.idle_s),
        records=Records(
            metrics,
            _usage_log(settings, prices),
            Audit(target=settings.audit_log),
            SlowRequests(settings.logs.slow_request_s, settings.logs.slow_ttft_s),
            open_tracer(settings.traces, "fovea-gateway", __version__),
        ),
    )
    metrics.refresh = lambda into: _set_gauges(services, into)
    life = Life(setup, services, fetcher)
    return Gateway(services, life.start, life.stop, life.reload)


class Life:
    """Runs what a worker does beside its requests, from its start to its end."""

    def __init__(self, setup: Setup, services: Services, fetcher: FetchCache) -> None:
        self._setup = setup
        self._services = services
        self._fetcher = fetcher
        self._tables = setup.tables
        self._discovery = Discovery(setup.tables.backends, setup.tables.discover)
        self._seen = _version(setup.path)
        self._seen_keys: dict[str, Version] = {}
        self._changing = asyncio.Lock()
        self._problem = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._followers: Followers | None = None
        self._stack = AsyncExitStack()
        self._watch = Watch(
            services.fleet,
            services.upstream.get,
            services.settings.resilience,
            services.clock,
            services.queues.resize,
            self._ejected,
        )

    async def start(self) -> None:
        """Find the backends and ask them for their models, then begin to look after them."""
        services = self._services
        services.fleet.configure(self._tables.models)
        await self._find_backends(self._discovery)
        await self._stack.enter_async_context(services.tenants.watching())
        if services.experiments is not None:
            services.experiments.start()
        await asyncio.gather(*(self._watch.check(backend) for backend in services.fleet))
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._watch.run()), loop.create_task(self._look_after())]

    async def stop(self) -> None:
        """End everything. Requests have ended before."""
        services = self._services
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._followers is not None:
            await self._followers.aclose()
        await services.shadows.aclose()
        await services.silence.aclose()
        await self._stack.aclose()
        if services.cache is not None:
            await services.cache.aclose()
        await services.accounts.aclose()
        if services.experiments is not None:
            await asyncio.to_thread(services.experiments.close)
        await asyncio.to_thread(services.records.close)
        services.inspector.close()
        await self._fetcher.aclose()
        await services.upstream.aclose()

    async def reload(self) -> str:
        """Read the tables of the file again, and use them. Raises ConfigError; then nothing has changed."""
        setup = self._setup
        if setup.read_tables is None:
            raise ConfigError("the gateway has no configuration file to read again")
        async with self._changing:
            tables = await asyncio.to_thread(setup.read_tables)
            discovery = Discovery(tables.backends, tables.discover, self._discovery)
            come, gone = await self._find_backends(discovery)
            self._tables, self._discovery = tables, discovery
            self._services.fleet.configure(tables.models)
            self._services.queues.resize()
        return f"backends: {', '.join(come) or 'none'} came, {', '.join(gone) or 'none'} went"

    async def _look_after(self) -> None:
        """Follow the file, the keys and sources of backends, and the drained ones."""
        looked = self._services.clock()
        while True:
            await asyncio.sleep(RELOAD_S)
            now = self._services.clock()
            key_files = {each.config.api_key_file for each in self._services.fleet}
            version, keys = await asyncio.to_thread(self._versions, key_files - {""})
            try:
                if version != self._seen:
                    self._seen = version
                    log.info("the configuration was read again: %s", await self.reload())
                elif keys != self._seen_keys or (self._discovery.has_sources and now - looked >= EVERY_S):
                    looked, self._seen_keys = now, keys
                    async with self._changing:
                        await self._find_backends(self._discovery)
                self._problem = ""
            except ConfigError as error:
                if error.message != self._problem:  # sources are looked at often
                    self._problem = error.message
                    log.error("the configuration stays what it was: %s", error.message)
            self._services.drains.apply(self._services.fleet, now)
            self._services.queues.resize()

    def _versions(self, key_files: Iterable[str]) -> tuple[Version, dict[str, Version]]:
        """Return the versions of the configuration file and of files of keys. For a thread."""
        return _version(self._setup.path), {name: _version(Path(name)) for name in key_files}

    async def _find_backends(self, discovery: Discovery) -> tuple[list[str], list[str]]:
        """Use the backends that the sources list now. Returns those that came and that went.

        Raises ConfigError for a key file that cannot be read; nothing has changed then.
        """
        services = self._services
        come, gone = services.fleet.update(await discovery.look(), services.clock())
        services.drains.apply(services.fleet, services.clock())
        for name in come:
            log.info("backend %s came", name)
        for name in gone:
            log.info("backend %s went", name)
        if come or gone:
            services.queues.resize()
            self._follow_caches()
        return come, gone

    def _follow_caches(self) -> None:
        """Follow the caches of backends that announce them. Raises ConfigError if a package is missing."""
        fleet = self._services.fleet
        if self._followers is None and any(
            one.config.encoder_events or one.config.kv_events for one in fleet
        ):
            try:
                from fovea.gateway.backends.holdings import Followers
            except ImportError as error:
                raise ConfigError(
                    f"events of backends need two packages: {install_command('events')} "
                    f"({error.name} is missing)",
                    param="encoder_events",
                ) from error
            self._followers = Followers(self._services.clock)
        if self._followers is not None:
            self._followers.update(fleet)

    def _ejected(self, backend: Backend) -> None:
        self._services.metrics.count("ejections", backend.name)


def _usage_log(settings: GatewaySettings, prices: PriceTable | None) -> UsageLog | None:
    if (path := settings.usage.path) is None:
        return None
    store = UsageStore(path, "" if prices is None else prices.currency)
    return UsageLog(store, settings.usage)


def _set_gauges(services: Services, metrics: Metrics) -> None:
    """Set the gauges of backends and queues, just before they are read."""
    now = services.clock()
    for backend in services.fleet:
        metrics.set("backend_up", float(backend.accepts(now, vision=False)), backend.name)
        metrics.set("backend_requests", backend.requests, backend.name)
        if backend.holdings is not None:
            metrics.set("backend_images_held", len(backend.holdings), backend.name)
        metrics.set("backend_tokens", backend.text, backend.name, "text")
        metrics.set("backend_tokens", backend.visual, backend.name, "visual")
        for stage, breaker in backend.breakers.items():
            metrics.set("breaker_open", float(breaker.state(now) is not State.CLOSED), backend.name, stage)
    for name, value in ({} if services.cache is None else services.cache.stats()).items():
        metrics.set("response_cache", value, name)
    for name, value in services.accounts.stats().items():
        metrics.set("accounts", value, name)
    for name, queue in services.queues:
        metrics.set("queued", queue.queue.waiting, metrics.models(name))
    for name, value in services.records.stats().items():
        metrics.set("traces", value, name)


def _version(path: Path | None) -> Version:
    """Return a value that differs after a file was changed or replaced; None: there is none."""
    if path is None:
        return None
    with suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino
    return None
