"""All backends of a gateway: which can serve a model, which are drained, and where they are found.

Backends are named in the configuration, or found in a file, by DNS, or in the endpoints of a Kubernetes
service.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fovea.core.config_files import parse_toml
from fovea.core.errors import ConfigError, NotFound
from fovea.gateway.backends.backend import Backend
from fovea.gateway.config import BackendConfig, DiscoverConfig, ModelConfig, api_key, read_tables
from fovea.gateway.settings import ResilienceSettings
from fovea.media.fetch.resolve import Resolver

log = logging.getLogger("fovea.gateway")
EVERY_S = 2.0
"""Seconds between two looks."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder of a pod's own token and of the certificate of the Kubernetes API."""
_TABLE = re.compile(r"^\s*\[\[\s*backend\s*\]\]", re.MULTILINE)
Look = Callable[[], Awaitable[Sequence[BackendConfig]]]
"""Returns the backends that a source lists now. Raises OSError, TimeoutError or ValueError if it cannot."""


class Fleet:
    """The backends and models of a gateway. Used by the event loop's thread only.

    version: changes whenever a backend comes, goes, or serves other models.
    """

    def __init__(self, settings: ResilienceSettings) -> None:
        self.version = 0
        self._settings = settings
        self._backends: dict[str, Backend] = {}
        self._configured: dict[str, ModelConfig] = {}
        self._models: dict[str, ModelConfig] = {}

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._backends.values())

    def __len__(self) -> int:
        return len(self._backends)

    def get(self, name: str) -> Backend | None:
        """The backend of a name."""
        return self._backends.get(name)

    def configure(self, models: Sequence[ModelConfig]) -> None:
        """Use other models from now on."""
        self._configured = {name: model for model in models for name in (model.name, *model.aliases)}
        self.changed()

    def update(self, configs: Iterable[BackendConfig], now: float) -> tuple[list[str], list[str]]:
        """Use other backends from now on. Those that stay keep their state; those that go finish their work.

        Returns the names of the backends that came and that went. Raises ConfigError for a key file that
        cannot be read; nothing has changed then.
        """
        wanted = {config.name: config for config in configs}
        keys = {name: api_key(config) for name, config in wanted.items()}
        gone = [name for name, old in self._backends.items() if wanted.get(name) != old.config]
        come = [name for name in wanted if name not in self._backends or name in gone]
        old = {name: self._backends.pop(name) for name in gone}
        for backend in old.values():
            backend.removed = True
        for name, stays in self._backends.items():
            stays.key = keys[name]  # its file may have changed
        warm = bool(self._backends)
        for name in come:
            self._backends[name] = backend = Backend(wanted[name], self._settings, now, keys[name])
            if name in old and not backend.models and old[name].config.url == backend.config.url:
                backend.models = old[name].models  # until it is asked again
            if warm:  # it joins others
                backend.come_back(now)
        if come or gone:
            self.changed()
        return come, [name for name in gone if name not in wanted]

    def learn_models(self, backend: Backend, models: Iterable[str]) -> None:
        """Note the models that a backend says it serves."""
        known = frozenset(models)
        if known != backend.models:
            backend.models = known
            self.changed()

    def changed(self) -> None:
        """Note that something about backends or models has changed."""
        self.version += 1
        self._models = dict(self._configured)
        for backend in self._backends.values():
            for name in backend.models:
                if name not in self._models and not self._is_served(name):
                    self._models[name] = ModelConfig(name)

    def _is_served(self, name: str) -> bool:
        """Whether a name is what backends call a configured model; clients then use the configured name."""
        return any(model.served == name for model in self._configured.values())

    def models(self) -> Iterator[ModelConfig]:
        """Yield every model once."""
        seen = set()
        for model in self._models.values():
            if model.name not in seen:
                seen.add(model.name)
                yield model

    def model(self, name: str) -> ModelConfig:
        """Return the model of a name or an alias. "" is the only one that there is.

        Raises NotFound if it is not served.
        """
        found = self._models.get(name)
        if found is None and not name:
            names = {model.name for model in self._models.values()}
            found = self._models[names.pop()] if len(names) == 1 else None
        if found is None:
            shown = ", ".join(sorted(self._models)[:20]) or "none yet"
            raise NotFound(
                f"model {name[:100]!r} is not served here; served: {shown}",
                param="model",
                code="model_not_found",
            )
        return found

    def serving(self, model: ModelConfig) -> list[Backend]:
        """Return the backends that can serve a model, whatever their state is."""
        served = model.served or model.name
        return [
            backend
            for backend in self._backends.values()
            if (not model.backends or backend.name in model.backends)
            and (served in backend.models or (not backend.models and bool(model.backends)))
        ]


class Drains:
    """The names of drained backends.

    path: file that all workers read; None: there is one worker, and its memory is enough.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._names: frozenset[str] = frozenset()

    def set(self, name: str, *, drain: bool) -> None:
        """Drain a backend, or stop to."""
        self._read()
        self._names = self._names | {name} if drain else self._names - {name}
        if self._path is not None:
            # Replaced as a whole, so that another worker never reads half of it.
            new = self._path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(sorted(self._names)), encoding="utf-8")
            new.replace(self._path)

    def apply(self, fleet: Fleet, now: float) -> None:
        """Drain the backends of the list, and no others. now: the clock in seconds."""
        self._read()
        for backend in fleet:
            drain = backend.name in self._names
            if backend.draining and not drain:
                backend.come_back(now)
            backend.draining = drain

    def _read(self) -> None:
        if self._path is not None:
            with suppress(OSError, ValueError):
                self._names = frozenset(json.loads(self._path.read_text(encoding="utf-8")))


class Discovery:
    """The backends of all sources, the fixed ones among them.

    A source that cannot be read keeps the backends that it listed before: an outage of DNS or of the
    Kubernetes API must not stop the gateway.
    """

    def __init__(
        self,
        fixed: Sequence[BackendConfig],
        sources: Sequence[DiscoverConfig],
        before: Discovery | None = None,
    ) -> None:
        """before: the discovery that this one replaces. What its sources listed is kept for the same sources.

        Raises ConfigError for a source that is not well formed.
        """
        self._fixed = tuple(fixed)
        self._sources = {source.source: source for source in sources}
        self._looks = {source.source: look_of(source) for source in sources}
        self._listed: dict[str, tuple[BackendConfig, ...]] = {}
        if before is not None:
            self._listed = {
                name: listed
                for name, listed in before._listed.items()
                if self._sources.get(name) == before._sources[name]
            }
        self._failing: set[str] = set()

    @property
    def has_sources(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._looks)

    async def look(self) -> tuple[BackendConfig, ...]:
        """Return all backends. If two have one name, the first stays."""
        for name, look in self._looks.items():
            try:
                listed = tuple(await look())
                for backend in listed:
                    api_key(backend)  # a listing whose keys cannot be read is not a listing
                self._listed[name] = listed
                self._failing.discard(name)
            except (OSError, TimeoutError, ValueError, ConfigError) as error:
                if name not in self._failing:
                    self._failing.add(name)
                    log.error("%s cannot be read, its backends stay: %s", name, error or type(error).__name__)
        found: dict[str, BackendConfig] = {}
        for backend in (*self._fixed, *(one for listed in self._listed.values() for one in listed)):
            found.setdefault(backend.name, backend)
        return tuple(found.values())


def look_of(source: DiscoverConfig) -> Look:
    """Return the function that looks at a source. Raises ConfigError for a source that is not well formed."""
    kind, _, place = source.source.partition(":")
    if kind == "file":
        return lambda: _file(Path(place), source.backend)
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"from is {source.source!r}; accepted: {kind}:...:PORT", param="from")
    if kind == "dns":
        resolver = Resolver(3.0, 8)
        return lambda: _dns(resolver, host, int(port), source.backend)
    namespace, _, service = host.partition("/")
    if not namespace or not service:
        raise ConfigError(
            f"from is {source.source!r}; accepted: kubernetes:NAMESPACE/SERVICE:PORT", param="from"
        )
    return lambda: _kubernetes(namespace, service, int(port), source.backend)


async def _file(path: Path, rest: Any) -> Sequence[BackendConfig]:
    """Read [[backend]] tables of a TOML file, or a URL per line. Empty lines and # are left out."""
    text = await asyncio.to_thread(path.read_text, encoding="utf-8")
    if _TABLE.search(text):
        values = parse_toml(text, str(path)).get("backend", [])
        return read_tables({"backend": [{**rest, **entry} for entry in values]}, path.parent).backends
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return read_tables({"backend": [{**rest, "url": line} for line in lines if line]}).backends


async def _dns(resolver: Resolver, host: str, port: int, rest: Any) -> Sequence[BackendConfig]:
    """Resolve a name with an address for each engine, as a headless service of Kubernetes has."""
    addresses = await resolver.resolve(host, port)
    return [_at(address, port, rest) for address in addresses]


def _at(address: str, port: int, rest: Any) -> BackendConfig:
    host = f"[{address}]" if ":" in address else address
    scheme = "https" if port == 443 else "http"
    return read_tables({"backend": [{**rest, "url": f"{scheme}://{host}:{port}"}]}).backends[0]


async def _kubernetes(namespace: str, service: str, port: int, rest: Any) -> Sequence[BackendConfig]:
    """Read the EndpointSlices of a service: the addresses of its pods that are ready and not terminating."""
    import aiohttp

    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    api_port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise OSError("KUBERNETES_SERVICE_HOST is not set, so this is not a pod")
    token = await asyncio.to_thread((ACCOUNT / "token").read_text)  # it is replaced every hour
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    name = f"[{host}]" if ":" in host else host
    url = (
        f"https://{name}:{api_port}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        f"?labelSelector=kubernetes.io/service-name%3D{service}"
    )
    timeout = aiohttp.ClientTimeout(total=5)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url, headers={"authorization": f"Bearer {token.strip()}"}, ssl=context) as response,
        ):
            body = await response.read()
            if response.status != 200:
                raise OSError(f"the Kubernetes API answered {response.status}: {body[:200]!r}")
    except aiohttp.ClientError as error:
        raise OSError(str(error)) from error
    return [_at(address, port, rest) for address in ready_addresses(json.loads(body))]


def ready_addresses(slices: dict[str, Any]) -> list[str]:
    """Return the addresses of endpoints that are ready, from a list of EndpointSlices, sorted.

    Raises ValueError if it is not such a list.
    """
    addresses: set[str] = set()
    try:
        for entry in slices["items"]:
            for endpoint in entry.get("endpoints") or []:
                conditions = endpoint.get("conditions") or {}
                if conditions.get("ready", True) and not conditions.get("terminating", False):
                    addresses.update(endpoint.get("addresses", []))
    except (AttributeError, KeyError, TypeError):
        raise ValueError("the Kubernetes API sent no list of EndpointSlices") from None
    return sorted(addresses)
