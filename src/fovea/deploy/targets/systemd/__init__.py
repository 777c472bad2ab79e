"""Units of systemd: a service for each engine and gateway, and a target that starts and stops all of them.

Fovea is installed in the virtual environment /opt/fovea. A proxy is rendered by a target of its own.
"""

from __future__ import annotations

from typing import Any

from fovea.deploy.formats import fill_template, toml_text
from fovea.deploy.machine import (
    LOOPBACK,
    Server,
    backend_tables,
    check_ports,
    engine_values,
    engines,
    gateway_values,
    gateways,
    service_ports,
)
from fovea.deploy.monitoring.files import monitoring_checks, prometheus_files
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.local import redis_configuration

EXPOSURE = 25
"""Highest exposure of a unit that the check accepts, in tenths of systemd's score from 0 to 10."""
COMMENT = "Rendered by `fovea deploy render --target systemd`. docs/deployment.md explains it."


def render(spec: DeploySpec) -> Files:
    """Return the units, users, folders and configurations.

    Raises ConfigError if two services would have one port.
    """
    check_ports(spec)
    ports = service_ports(spec)
    name = spec.name
    files = {
        f"units/{name}.target": fill_template("systemd/target.j2", name=name),
        f"sysusers.d/{name}.conf": fill_template("systemd/sysusers.conf.j2", name=name),
        f"tmpfiles.d/{name}.conf": fill_template("systemd/tmpfiles.conf.j2", name=name),
    }
    for engine in engines(spec):
        files[f"units/{name}-{engine.name}.service"] = _engine_unit(spec, engine)
        values = {**_keys(spec, keyed=spec.gateway is None), **engine_values(spec, engine)}
        files[f"config/{engine.name}.toml"] = toml_text(values, comment=COMMENT)
    for gateway in gateways(spec):
        files[f"units/{name}-{gateway.name}.service"] = _gateway_unit(spec, gateway)
        values = {**_keys(spec, keyed=True), **gateway_values(spec, gateway, f"{LOOPBACK}:{ports['redis']}")}
        tables = backend_tables(engines(spec))
        files[f"config/{gateway.name}.toml"] = toml_text(values, tables, comment=COMMENT)
    if spec.redis is not None:
        files[f"units/{name}-redis.service"] = _redis_unit(spec)
        files["config/redis.conf"] = redis_configuration(
            spec, port=ports["redis"], address=LOOPBACK, folder=f"/var/lib/{name}/redis"
        )
    watched = prometheus_files(
        spec,
        [each.address for each in engines(spec)],
        [each.address for each in gateways(spec)],
        f"{LOOPBACK}:{ports['alertmanager']}",
        key_file=f"/etc/{name}/metrics-key",
    )
    return {**files, **watched}


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the commands that check the rendered files."""
    services = [f"{{dir}}/units/{name}" for name in _services(spec)]
    units = [*services, f"{{dir}}/units/{spec.name}.target"]
    security = ("security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", *services)
    return (
        Check("systemd-analyze", ("verify", "--man=no", *units), "systemd reads the units", silent=True),
        Check("systemd-analyze", security, f"the exposure of each unit is at most {EXPOSURE / 10:g}"),
        *monitoring_checks(spec),
    )


def _services(spec: DeploySpec) -> list[str]:
    inner = [each.name for each in (*engines(spec), *gateways(spec))]
    names = [*inner, *(["redis"] if spec.redis else [])]
    return [f"{spec.name}-{each}.service" for each in names]


def _engine_unit(spec: DeploySpec, engine: Server) -> str:
    pool = engine.pool
    assert pool is not None
    return _unit(
        spec,
        f"engine of the pool {pool.name}, port {engine.port}",
        f"/opt/fovea/bin/fovea serve --config /etc/{spec.name}/{engine.name}.toml",
        stop_s=spec.stop_of(pool).process_s,
        cpus=pool.cpus,
        memory_mib=pool.memory_gib * 1024,
        cuda=pool.hardware == "cuda",
        folder=pool.model if pool.model.startswith("/") else "",
    )


def _gateway_unit(spec: DeploySpec, gateway: Server) -> str:
    assert spec.gateway is not None
    needed = [f"{spec.name}-{each.name}.service" for each in engines(spec)]
    return _unit(
        spec,
        f"gateway, port {gateway.port}",
        f"/opt/fovea/bin/fovea gateway --config /etc/{spec.name}/{gateway.name}.toml",
        stop_s=spec.stop.process_s,
        cpus=spec.gateway.cpus,
        memory_mib=spec.gateway.memory_gib * 1024,
        # Services that start before others stop after them: the gateway ends before engines and Redis do.
        after=[*needed, *([f"{spec.name}-redis.service"] if spec.redis else [])],
    )


def _redis_unit(spec: DeploySpec) -> str:
    assert spec.redis is not None
    return _unit(
        spec,
        "Redis for accounts and cached answers",
        f"/usr/bin/redis-server /etc/{spec.name}/redis.conf",
        stop_s=30,
        cpus=1,
        memory_mib=spec.redis.memory_mib * 2 + 128,
        state=f"{spec.name}/redis",
        only_loopback=True,
    )


def _unit(spec: DeploySpec, text: str, command: str, **values: Any) -> str:
    defaults: dict[str, Any] = {
        "after": [], "cuda": False, "folder": "", "state": spec.name, "only_loopback": False,
    }  # fmt: skip
    return fill_template(
        "systemd/service.j2", name=spec.name, text=text, command=command, **{**defaults, **values}
    )


def _keys(spec: DeploySpec, *, keyed: bool) -> dict[str, Any]:
    return {"keys_file": f"/etc/{spec.name}/keys.toml"} if keyed else {}
