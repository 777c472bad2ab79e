"""Engines and gateways of the Compose stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fovea.core.errors import ConfigError
from fovea.deploy.machine import Server, engines, gateways, redis_values, trace_values
from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.targets.compose import network
from fovea.deploy.targets.compose.service import data_mount, file_mount, service
from fovea.deploy.targets.docker import HOME, USER_ID

KEYS = "/etc/fovea/keys"
CONFIG = "/etc/fovea/config.toml"
GATEWAY = "/etc/fovea/gateway"
LOAD_S = 900
"""Seconds in which an engine may load its model, or download it."""


def engine_services(spec: DeploySpec) -> dict[str, Any]:
    """Return the services of all engines. Each CUDA engine has a GPU of its own."""
    found = {}
    gpu = 0
    for number, engine in enumerate(engines(spec)):
        pool = _pool(engine)
        devices: list[str] = []
        if pool.hardware == "cuda":
            devices = [str(gpu)]
            gpu += 1
        address = None if spec.gateway is not None else network.behind(number)
        found[engine.name] = _engine(spec, engine, address, devices)
    return found


def gateway_services(spec: DeploySpec) -> dict[str, Any]:
    """Return the services of all gateways."""
    return {each.name: _gateway(spec, each, number) for number, each in enumerate(gateways(spec))}


def behind(spec: DeploySpec) -> tuple[Server, ...]:
    """Return the servers behind the proxy with their fixed addresses."""
    inner, port = (gateways(spec), spec.gateway_port) if spec.gateway else (engines(spec), spec.engine_port)
    return tuple(Server(each.name, network.behind(number), port) for number, each in enumerate(inner))


def engine_settings(spec: DeploySpec, pool: Pool) -> dict[str, Any]:
    """Return the settings of a pool's engines in containers. The pool's own settings win."""
    values: dict[str, Any] = {"trusted_proxies": [str(network.ENGINES) if spec.gateway else network.PROXY]}
    if spec.gateway is None:
        values["keys_file"] = f"{KEYS}/keys.toml"
    values |= trace_values(spec)
    return {**values, **spec.engine_settings(pool), "host": "0.0.0.0", "port": spec.engine_port}


def gateway_settings(spec: DeploySpec) -> dict[str, Any]:
    """Return the settings of the gateways in containers. The spec's own settings win."""
    return {
        "trusted_proxies": [network.PROXY],
        "keys_file": f"{KEYS}/keys.toml",
        **redis_values(spec, "redis:6379"),
        **trace_values(spec),
        **spec.gateway_settings(),
        "host": "0.0.0.0",
        "port": spec.gateway_port,
    }


def metrics_addresses(spec: DeploySpec) -> tuple[list[str], list[str]]:
    """Return the addresses of engines and gateways for Prometheus."""
    return (
        [f"{each.name}:{spec.engine_port}" for each in engines(spec)],
        [f"{each.name}:{spec.gateway_port}" for each in gateways(spec)],
    )


def _engine(spec: DeploySpec, engine: Server, address: str | None, devices: Sequence[str]) -> dict[str, Any]:
    pool = _pool(engine)
    volume = f"{pool.name}-data"
    mounts = [file_mount(f"pool-{pool.name}.toml", CONFIG), data_mount(volume, HOME)]
    if pool.model.startswith("~"):
        raise ConfigError(
            f"[[pool]] {pool.name!r}: model is {pool.model!r}; accepted in containers: an absolute folder, a "
            "hub id, or fovea-tiny",
            param="model",
        )
    if pool.model.startswith("/"):
        mounts.append(file_mount(pool.model, pool.model))
    more: dict[str, Any] = {}
    if devices:
        more["reservations"] = {
            "devices": [
                {
                    "driver": "nvidia",
                    "device_ids": [f"{device}:0" if pool.mig else device for device in devices],
                    "capabilities": ["gpu"],
                }
            ]
        }
    return _server(
        spec,
        spec.image_of(pool),
        ("serve", "--config", CONFIG),
        spec.engine_port,
        cpus=pool.cpus,
        memory_mib=pool.memory_gib * 1024,
        temporary_mib=1024,
        start_s=LOAD_S,
        stop_s=spec.stop_of(pool).grace_s,
        keys=spec.gateway is None,
        volumes=mounts,
        networks=_networks(spec, address, inner="engines"),
        **more,
    )


def _gateway(spec: DeploySpec, gateway: Server, number: int) -> dict[str, Any]:
    assert spec.gateway is not None
    needed = {"redis": {"condition": "service_healthy"}} if spec.redis else {}
    names = _networks(spec, network.behind(number), inner="engines")
    if spec.redis:
        names["data"] = {}
    return _server(
        spec,
        spec.image,
        ("gateway", "--config", f"{GATEWAY}/gateway.toml"),
        spec.gateway_port,
        cpus=spec.gateway.cpus,
        memory_mib=spec.gateway.memory_gib * 1024,
        start_s=LOAD_S,  # it is ready when an engine is
        stop_s=spec.stop.grace_s,
        keys=True,
        volumes=[file_mount("gateway", GATEWAY)],
        networks=names,
        **({"depends_on": needed} if needed else {}),
    )


def _server(
    spec: DeploySpec, image: str, command: Sequence[str], port: int, *, keys: bool, **more: Any
) -> dict[str, Any]:
    probe = (
        "import urllib.request as u; "
        f"u.build_opener(u.ProxyHandler({{}})).open('http://127.0.0.1:{port}/ready', timeout=4)"
    )
    environment = {"FOVEA_PORT": str(port)}
    if keys:
        more["volumes"] = [*more["volumes"], file_mount("secrets/keys", KEYS)]
    return service(
        image,
        command,
        user=f"{USER_ID}:{USER_ID}",
        health=["python", "-c", probe],
        environment=environment,
        ulimits={"nofile": {"soft": 65536, "hard": 65536}},
        **more,
    )


def _networks(spec: DeploySpec, address: str | None, *, inner: str) -> dict[str, Any]:
    found: dict[str, Any] = {inner: {}}
    if address is not None:
        found["front"] = {"ipv4_address": address}
    if spec.monitoring is not None:
        found["monitoring"] = {}
    return found


def _pool(engine: Server) -> Pool:
    assert engine.pool is not None
    return engine.pool
