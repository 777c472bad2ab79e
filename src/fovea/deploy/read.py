"""Reads a spec from TOML. An error names the table, the key, and what is accepted."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fovea.core.errors import ConfigError
from fovea.core.settings import settings_of
from fovea.deploy.spec import Cloud, DeploySpec, Gateway, Monitoring, Pool, Redis, Scale, Stop

T = TypeVar("T")
SECTIONS: dict[str, Callable[..., Any]] = {
    "gateway": Gateway,
    "redis": Redis,
    "monitoring": Monitoring,
    "stop": Stop,
    "scale": Scale,
    "cloud": Cloud,
}
RENDERED = ("host", "port", "model", "served_model_name", "config", "api_key", "admin_key", "metrics_key")
"""Settings of `fovea serve` and `fovea gateway` that renderers set themselves."""


@dataclass(frozen=True, slots=True)
class KnownSettings:
    """Names of the settings that the tables `settings` of a pool and of the gateway may hold."""

    engine: Collection[str]
    gateway: Collection[str]


def read_spec(path: Path, known: KnownSettings) -> DeploySpec:
    """Read a spec file. Raises ConfigError."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="spec") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", param="spec") from error
    try:
        return spec_of(values, known)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", param=error.param) from error


def spec_of(values: Mapping[str, Any], known: KnownSettings) -> DeploySpec:
    """Return the spec of parsed TOML. Raises ConfigError."""
    own = {name: value for name, value in values.items() if name not in SECTIONS and name != "pool"}
    _check_keys("", own, [*_names(DeploySpec), "pool", *SECTIONS])
    pools = values.get("pool", [])
    if not isinstance(pools, list) or not all(isinstance(pool, dict) for pool in pools):
        raise ConfigError("pool is no list of tables; accepted: [[pool]]", param="pool")
    parts: dict[str, Any] = {}
    for name, cls in SECTIONS.items():
        if name in values:
            parts[name] = _table(f"[{name}]", cls, values[name], known.gateway)
    read = tuple(
        _table(f"[[pool]] number {number}", Pool, pool, known.engine) for number, pool in enumerate(pools, 1)
    )
    return DeploySpec(pools=read, **own, **parts)


def _table(where: str, cls: Callable[..., T], values: Any, known: Collection[str]) -> T:
    """Return one table as its dataclass. Raises ConfigError that names the table."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is {values!r}; accepted: a table", param=where)
    fields = _names(cls)
    has_settings = cls in (Pool, Gateway)
    _check_keys(where, values, [*fields, "settings"] if has_settings else fields)
    if "settings" in values:
        _check_settings(f"{where} settings", values["settings"], known)
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", param=error.param) from error


def _check_settings(where: str, values: Any, known: Collection[str]) -> None:
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is {values!r}; accepted: a table of settings", param="settings")
    for name in values:
        if name in RENDERED:
            raise ConfigError(
                f"{where} holds {name}, which is rendered from the rest of the spec or given as a secret",
                param=name,
            )
    _check_keys(where, values, [name for name in known if name not in RENDERED])


def _check_keys(where: str, values: Mapping[str, Any], known: Collection[str]) -> None:
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"accepted: {', '.join(sorted(known))}"
            prefix = f"{where}: " if where else ""
            raise ConfigError(f"{prefix}unknown key {name!r}; {hint}", param=name)


def _names(cls: Any) -> list[str]:
    return [entry.name for entry in settings_of(cls, nested=False)]
