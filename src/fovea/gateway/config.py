"""The tables of the gateway's TOML file: backends, models, and where backends are found.

    [[backend]]
    url = "http://10.0.0.7:8000"
    name = "a100-1"                 # default: host and port
    models = ["qwen3-vl-8b"]        # default: those that its /v1/models lists
    weight = 1.0
    priority = 0
    api_key_file = "/run/secrets/a100-1"

    [[discover]]
    from = "dns:engines.internal:8000"    # or file:PATH, kubernetes:NAMESPACE/SERVICE:PORT

    [[model]]
    name = "large"
    aliases = ["gpt-4o"]
    served = "Qwen/Qwen3-VL-32B-Instruct" # what backends call it; default: the name
    fallback = ["medium", "small"]

All other keys of the file are settings (`settings.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fovea.core.config_files import check_keys, errors_in, nearest, tables
from fovea.core.errors import ConfigError
from fovea.core.findings import Findings, joined
from fovea.core.names import is_socket_address
from fovea.gateway.settings import POLICIES

T = TypeVar("T")
APIS = ("chat", "completions", "messages", "responses")
EVENTS = ("encoder_events", "kv_events")
DEGRADE = ("auto", "detail", "max-pixels", "off")


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """One engine.

    url: its address without /v1.
    name: its name in headers, metrics and logs; "": host and port.
    models: names of the models that it serves; empty: it is asked.
    weight: its part of the load, relative to the weights of others.
    priority: smaller ones are used first under the policy `priority`.
    api_key_file: file of the key that is sent to it; "": none is sent.
    max_requests, max_tokens: what it may have outstanding; 0: the setting for all.
    apis: APIs that it offers itself; the others are translated to chat.
    degrade: how it is asked for fewer visual tokens. "auto": by `detail` if it says that it is Fovea. Others
        are not asked, because they refuse levels that they do not know.
    health: path of its health check; "": /ready, or /health if it has none.
    encoder_events, kv_events: addresses at which it announces what its caches hold, as in its own settings;
        "*" stands for the host of its URL. "": it does not. The names with _replay are those at which it
        repeats announcements.
    """

    url: str
    name: str = ""
    models: tuple[str, ...] = ()
    weight: float = 1.0
    priority: int = 0
    api_key_file: str = ""
    max_requests: int = 0
    max_tokens: int = 0
    apis: tuple[str, ...] = ("chat", "completions")
    degrade: str = "auto"
    health: str = ""
    encoder_events: str = ""
    encoder_events_replay: str = ""
    kv_events: str = ""
    kv_events_replay: str = ""

    def __post_init__(self) -> None:
        findings = Findings()
        for check in (self._check_address, self._check_words, self._check_events):
            with findings.part():
                check()
        findings.check()
        url = self.url.rstrip("/").removesuffix("/v1")
        object.__setattr__(self, "url", url)
        if not self.name:
            object.__setattr__(self, "name", urlsplit(url).netloc)

    def _check_address(self) -> None:
        _check_url(self.url)
        if self.health and not self.health.startswith("/"):
            raise ConfigError(f"health is {self.health!r}; accepted: a path such as /health", param="health")

    def _check_words(self) -> None:
        if not 0.001 <= self.weight <= 1000:
            raise ConfigError(f"weight is {self.weight!r}; accepted: 0.001 to 1000", param="weight")
        _check_choices("apis", self.apis, APIS)
        _check_choices("degrade", (self.degrade,), DEGRADE)

    def _check_events(self) -> None:
        for name in EVENTS:
            for key in (name, f"{name}_replay"):
                _check_events(key, getattr(self, key))
            if getattr(self, f"{name}_replay") and not getattr(self, name):
                raise ConfigError(f"{name}_replay is given without {name}", param=f"{name}_replay")
        if self.kv_events and not self.encoder_events:
            raise ConfigError(
                "kv_events names images by hashes, whose images only encoder_events tells; give that, too",
                param="kv_events",
            )


@dataclass(frozen=True, slots=True)
class DiscoverConfig:
    """A place where backends are found; its other keys are those of each backend.

    source: "dns:HOST:PORT", "file:PATH" or "kubernetes:NAMESPACE/SERVICE:PORT".
    backend: the other keys.
    """

    source: str
    backend: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.source.partition(":")[0] not in ("dns", "file", "kubernetes"):
            raise ConfigError(
                f"from is {self.source!r}; accepted: dns:HOST:PORT, file:PATH, "
                "kubernetes:NAMESPACE/SERVICE:PORT",
                param="from",
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model that clients can name.

    name: its name for clients.
    aliases: further names.
    served: what backends call it; "": the name.
    backends: names of the backends that may serve it; empty: all that list it.
    fallback: names of models that answer if no backend of this one can, in order.
    version: changes when its answers do, so that older ones are not taken from the cache.
    visual_rule: how its visual tokens are counted: a known model's name, a checkpoint's folder,
        "openai-tiles" or "estimate"; "": by the name.
    policy: how its backends are chosen; "": the setting for all.
    """

    name: str
    aliases: tuple[str, ...] = ()
    served: str = ""
    backends: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    version: str = ""
    visual_rule: str = ""
    policy: str = ""

    def __post_init__(self) -> None:
        if "" in (self.name, *self.aliases):
            raise ConfigError("a name is empty; accepted: a text of one character and more", param="name")
        if self.policy:
            _check_choices("policy", (self.policy,), POLICIES)


@dataclass(frozen=True, slots=True)
class Tables:
    """All tables of the file.

    experiments: the tables [[experiment]] as they are in the file.
    """

    backends: tuple[BackendConfig, ...] = ()
    discover: tuple[DiscoverConfig, ...] = ()
    models: tuple[ModelConfig, ...] = ()
    experiments: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        _check_unique("backend", [backend.name for backend in self.backends])
        names = [name for model in self.models for name in (model.name, *model.aliases)]
        _check_unique("model", names)
        for model in self.models:
            for name in model.fallback:
                if name not in names:
                    raise ConfigError(
                        f"[[model]] {model.name!r}: fallback names {name!r}; accepted: names of models of "
                        f"this file: {', '.join(sorted(names))}",
                        param="fallback",
                    )


def check_backends(tables: Tables) -> None:
    """Raise ConfigError for names of models' backends that no backend has. Those of found ones vary."""
    known = {backend.name for backend in tables.backends}
    if tables.discover:
        return
    errors = [
        ConfigError(
            f"[[model]] {model.name!r}: unknown backend {name!r}; {nearest(name, known)}", at=("model", at)
        )
        for at, model in enumerate(tables.models, 1)
        for name in model.backends
        if name not in known
    ]
    if errors:
        raise joined(errors)


TABLES = ("backend", "discover", "model", "experiment", "experiments")
"""Keys of the file that are not settings."""


def read_tables(values: Mapping[str, Any], base: Path | None = None) -> Tables:
    """Read the tables of a parsed file.

    base: folder of the file; relative paths of secrets begin there.
    Raises ConfigError with all errors; each names the table and the field.
    """

    def backend(entry: dict[str, Any]) -> BackendConfig:
        read = _read(BackendConfig, entry)
        if base is not None and read.api_key_file:
            object.__setattr__(read, "api_key_file", str(base / read.api_key_file))
        return read

    def discover(entry: dict[str, Any]) -> DiscoverConfig:
        rest = {name: value for name, value in entry.items() if name != "from"}
        for name in ("url", "name"):
            if name in rest:
                raise ConfigError(
                    f"{name} cannot be given here, because each backend has its own; accepted: from, and "
                    "other keys of [[backend]]",
                    param=name,
                )
        _read(BackendConfig, {"url": "http://host", **rest})
        return DiscoverConfig(str(entry.get("from", "")), rest)

    findings = Findings()
    backends: tuple[BackendConfig, ...] = ()
    discovered: tuple[DiscoverConfig, ...] = ()
    models: tuple[ModelConfig, ...] = ()
    with findings.part():
        backends = _each(values, "backend", backend)
    with findings.part():
        discovered = _each(values, "discover", discover)
    with findings.part():
        models = _each(values, "model", lambda entry: _read(ModelConfig, entry))
    findings.check()
    return Tables(backends, discovered, models, _each(values, "experiment", dict))


def api_key(backend: BackendConfig) -> str:
    """Return the key that is sent to a backend; "": none. Raises ConfigError if its file cannot be read."""
    if not backend.api_key_file:
        return ""
    try:
        return Path(backend.api_key_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(
            f"backend {backend.name!r}: {backend.api_key_file} cannot be read: {reason}", param="api_key_file"
        ) from error


def _each(values: Mapping[str, Any], table: str, read: Callable[[dict[str, Any]], T]) -> tuple[T, ...]:
    done, findings = [], Findings()
    for number, entry in enumerate(tables("", values, table), 1):
        with findings.part(table, number), errors_in(f"[[{table}]] number {number}"):
            done.append(read(entry))
    findings.check()
    return tuple(done)


def _read(cls: type[T], entry: Mapping[str, Any]) -> T:
    """Return a dataclass from a table. Raises ConfigError for all unknown, missing and wrong fields."""
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    findings, values = Findings(), {}
    with findings.part():
        check_keys("", entry, known)
    findings.errors += [
        ConfigError(f"{name} is missing", param=name)
        for name, field in known.items()
        if field.default is MISSING and name not in entry
    ]
    for name in [name for name in entry if name in known]:
        with findings.part():
            values[name] = _value(name, entry[name], known[name].default)
    findings.check()
    return cls(**values)


def _value(name: str, value: Any, default: Any) -> Any:
    """Return a value in the type of its default; a field without one is text."""
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name} is {value!r}; accepted: a list of texts", param=name)
        return tuple(value)
    kind: Any = str if default is MISSING else type(default)
    accepted = (int, float) if kind is float else kind
    if isinstance(value, bool) or not isinstance(value, accepted):
        words = {str: "a text", int: "a whole number", float: "a number"}
        raise ConfigError(f"{name} is {value!r}; accepted: {words[kind]}", param=name)
    if kind is int and value < 0:
        raise ConfigError(f"{name} is {value}; accepted: 0 and more", param=name)
    return kind(value)


def _check_url(url: str) -> None:
    wrong = ConfigError(f"url is {url!r}; accepted: http://HOST:PORT or https://HOST", param="url")
    try:
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise ConfigError("url holds a user name or password; accepted: api_key_file", param="url")
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise wrong
    if port == 0 or any(char <= " " for char in url):
        raise wrong


def _check_events(name: str, address: str) -> None:
    if address and not is_socket_address(address):
        raise ConfigError(
            f"{name} is {address!r}; accepted: tcp://HOST:PORT with * for the host of the url, or ipc://PATH",
            param=name,
        )


def _check_choices(name: str, values: tuple[str, ...], accepted: tuple[str, ...]) -> None:
    for value in values:
        if value not in accepted:
            raise ConfigError(f"{name} has {value!r}; accepted: {', '.join(accepted)}", param=name)


def _check_unique(table: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"[[{table}]]: the name {name!r} is given twice", param="name")
