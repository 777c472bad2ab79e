"""Reads a spec from TOML. An error names the table, the key, and what is accepted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fovea.core.config_files import check_keys, read_toml, settings_table, tables
from fovea.core.errors import ConfigError
from fovea.core.findings import Findings, renamed
from fovea.core.settings import settings_of, value_errors
from fovea.deploy.monitoring.objectives import Targets
from fovea.deploy.spec import Cloud, DeploySpec, Gateway, Monitoring, Pool, Redis, Scale, Stop
from fovea.deploy.tables import Images, Kubernetes, Tracing

SECTIONS: dict[str, Callable[..., Any]] = {
    "gateway": Gateway,
    "redis": Redis,
    "monitoring": Monitoring,
    "stop": Stop,
    "scale": Scale,
    "cloud": Cloud,
    "tracing": Tracing,
    "kubernetes": Kubernetes,
    "images": Images,
}
_SECRET = "a secret, as docs/deployment.md says for each target"
RENDERED: Mapping[str, str] = {
    "host": "nothing",
    "port": "engine_port or gateway_port",
    "model": "model of [[pool]]",
    "served_model_name": "served_name of [[pool]]",
    "device": "hardware of [[pool]]",
    "config": "nothing",
    **dict.fromkeys(("api_key", "admin_key", "metrics_key", "keys_file"), _SECRET),
    **dict.fromkeys(("tls_cert", "tls_key"), "tls"),
    "trusted_proxies": "trusted_proxies at the top",
    "max_body_mib": "max_body_mib at the top",
    **dict.fromkeys(("request_timeout", "total_s"), "max_answer_s"),
    **dict.fromkeys(("drain_seconds", "lame_duck_s"), "[stop]"),
    "otlp_endpoint": "otlp_endpoint of [monitoring], or [tracing]",
}
"""Settings of `fovea serve` and `fovea gateway` that renderers set, and what to use in their place."""
RENDERED_WITH: Mapping[str, Mapping[str, str]] = {
    "redis": dict.fromkeys(
        ("redis", "accounts", "response_cache_redis_mib", "accounts_sharers"),
        "[redis], or the setting without that table",
    ),
    "tracing": {
        "otlp_protocol": "[tracing], or the setting without that table",
        "trace_share": "share of [tracing]",
    },
}
"""The same by tables of the spec: with such a table, these are set, too."""


Check = Callable[[Mapping[str, Any]], list[ConfigError]]


@dataclass(frozen=True, slots=True)
class KnownSettings:
    """Settings that the tables `settings` of a pool and of the gateway may hold.

    engine, gateway: their names.
    check_engine, check_gateway: return the errors of values, by name; None: values are not checked.
    """

    engine: Collection[str]
    gateway: Collection[str]
    check_engine: Check | None = None
    check_gateway: Check | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    """The settings of one table `settings`: their names, their check, and those that a renderer sets."""

    names: Collection[str]
    check: Check | None
    rendered: Mapping[str, str]


def read_spec(path: Path, known: KnownSettings) -> DeploySpec:
    """Read a spec file. Raises ConfigError."""
    values = read_toml(path, param="spec")
    with values.errors():
        return spec_of(values, known)


def spec_of(values: Mapping[str, Any], known: KnownSettings) -> DeploySpec:
    """Return the spec of parsed TOML. Raises ConfigError with all errors of all tables."""
    names = [entry.name for entry in settings_of(DeploySpec, nested=False)]
    own: dict[str, Any] = {
        name: tuple(each) if isinstance(each, list) else each
        for name, each in values.items()
        if name in names
    }
    findings, rendered = Findings(), dict(RENDERED)
    for name in RENDERED_WITH.keys() & values.keys():
        rendered |= RENDERED_WITH[name]
    gateway = _Known(known.gateway, known.check_gateway, rendered)
    engine = _Known(known.engine, known.check_engine, rendered)
    with findings.part():
        check_keys("", values, [*names, "pool", *SECTIONS])
    parts, pools = {}, []
    for name, cls in SECTIONS.items():
        if name in values:
            with findings.part(name):
                parts[name] = _table(f"[{name}]", cls, values[name], gateway)
    entries: list[dict[str, Any]] = []
    with findings.part():
        entries = tables("", values, "pool")
    for number, entry in enumerate(entries, 1):
        with findings.part("pool", number):
            where = f"[[pool]] number {number}"
            pools.append(_table(where, Pool, entry, engine))
    given = [(entry, own[entry.name]) for entry in settings_of(DeploySpec) if entry.name in own]
    findings.errors += value_errors(given)
    findings.check()
    return DeploySpec(pools=tuple(pools), **own, **parts)


def _table(where: str, cls: Callable[..., Any], values: Any, known: _Known) -> Any:
    """Return one table as its dataclass. Raises ConfigError that names the table."""
    if cls is Monitoring and isinstance(values, Mapping):
        given, findings = values.get("targets", {}), Findings()
        with findings.part("targets"):
            settings_table(Targets, "[monitoring.targets]", given)
        if findings.errors:  # the class would say them again
            with findings.part():
                settings_table(cls, where, {key: values[key] for key in values if key != "targets"})
        findings.check()
        return settings_table(cls, where, values, targets=given)
    if cls not in (Pool, Gateway) or not isinstance(values, Mapping):
        return settings_table(cls, where, values)
    settings, findings = values.get("settings", {}), Findings()
    with findings.part("settings"):
        _check_settings(f"{where} settings", settings, known)
    with findings.part():
        made = settings_table(cls, where, values, settings=settings if isinstance(settings, Mapping) else {})
    findings.check()
    return made


def _check_settings(where: str, values: Any, known: _Known) -> None:
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is {values!r}; accepted: a table of settings", param="settings")
    findings = Findings()
    findings.errors += [
        ConfigError(
            f"{where} holds {name}, which is rendered from the rest of the spec; accepted in its place: "
            f"{known.rendered[name]}",
            param=name,
        )
        for name in values
        if name in known.rendered
    ]
    rest = {name: value for name, value in values.items() if name not in known.rendered}
    with findings.part():
        check_keys(where, rest, [name for name in known.names if name not in known.rendered])
    if known.check is not None:
        findings.errors += [renamed(each, where) for each in known.check(rest)]
    findings.check()


def unused_images(spec: DeploySpec) -> list[str]:
    """Return a sentence for each image of [images] whose service the spec does not have."""
    monitoring, tracing = spec.monitoring, spec.tracing
    users = {
        "redis": (spec.redis is not None, "[redis]"),
        "prometheus": (monitoring is not None, "[monitoring]"),
        "alertmanager": (monitoring is not None and monitoring.alerts, "alert_webhook of [monitoring]"),
        "grafana": (monitoring is not None and monitoring.grafana, "[monitoring] with grafana = true"),
        "collector": (tracing is not None, "[tracing]"),
        "jaeger": (tracing is not None and not tracing.backend, "[tracing] without backend"),
    }
    return [
        f"[images] {name} is not used; accepted: {table}, or no {name}"
        for name, (used, table) in users.items()
        if getattr(spec.images, name) and not used
    ]
