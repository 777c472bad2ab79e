"""The servers of a deployment on one machine: their names and ports.

Engines have the ports from `engine_port` on, and gateways from `gateway_port` on. Services that the spec has
no port for follow the gateways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fovea.core.errors import ConfigError
from fovea.deploy.spec import DeploySpec, Pool, whole_number
from fovea.deploy.tracing import trace_values

LOOPBACK = "127.0.0.1"
SERVICES = ("redis", "prometheus", "alertmanager", "envoy-admin")
"""Services beside engines, gateways and the proxy. Their ports are gateway_port + 100 and so on."""


@dataclass(frozen=True, slots=True)
class Server:
    """One engine or one gateway.

    name: its name, which is unique in the deployment.
    host, port: where it listens.
    pool: the pool of an engine; None: a gateway.
    """

    name: str
    host: str
    port: int
    pool: Pool | None = None

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"


def engines(spec: DeploySpec) -> tuple[Server, ...]:
    """Return the engines of all pools, on the loopback interface."""
    each = [(pool, number) for pool in spec.pools for number in range(pool.replicas)]
    return tuple(
        Server(f"engine-{pool.name}-{number}", LOOPBACK, spec.engine_port + count, pool)
        for count, (pool, number) in enumerate(each)
    )


def gateways(spec: DeploySpec) -> tuple[Server, ...]:
    """Return the gateways, on the loopback interface."""
    count = spec.gateway.replicas if spec.gateway is not None else 0
    return tuple(Server(f"gateway-{number}", LOOPBACK, spec.gateway_port + number) for number in range(count))


def behind_proxy(spec: DeploySpec) -> tuple[Server, ...]:
    """Return the servers that the proxy sends requests to: the gateways, or the engines if there is none."""
    return gateways(spec) or engines(spec)


def service_ports(spec: DeploySpec) -> dict[str, int]:
    """Return the ports of `SERVICES`."""
    return {name: spec.gateway_port + 100 + number for number, name in enumerate(SERVICES)}


def check_ports(spec: DeploySpec) -> None:
    """Raise ConfigError if a port is above 65535, or two servers would have the same one."""
    users: dict[int, str] = {spec.public_port: "the proxy"}
    if spec.tls and spec.redirect_port:
        users[spec.redirect_port] = "the proxy's redirect to HTTPS"
    named = [(each.name, each.port) for each in (*engines(spec), *gateways(spec))]
    for name, port in [*named, *service_ports(spec).items()]:
        if port > 65535 or port in users:
            reason = f"is also that of {users[port]}" if port in users else "is above 65535"
            raise ConfigError(
                f"on one machine, {name} has port {port}, which {reason}; accepted: engine_port, "
                "gateway_port and proxy_port further apart",
                param="gateway_port" if name in service_ports(spec) else "engine_port",
            )
        users[port] = name


def engine_values(spec: DeploySpec, engine: Server) -> dict[str, Any]:
    """Return the settings of an engine of this machine. The pool's own settings win."""
    assert engine.pool is not None
    return {
        "trusted_proxies": [LOOPBACK, *spec.trusted_proxies],
        **trace_values(spec),
        **spec.engine_settings(engine.pool),
        "host": engine.host,
        "port": engine.port,
    }


def gateway_values(spec: DeploySpec, gateway: Server, redis: str) -> dict[str, Any]:
    """Return the settings of a gateway of this machine. The spec's own settings win.

    redis: "HOST:PORT" of Redis.
    """
    return {
        "trusted_proxies": [LOOPBACK, *spec.trusted_proxies],
        **redis_values(spec, redis),
        **trace_values(spec),
        **spec.gateway_settings(),
        "host": gateway.host,
        "port": gateway.port,
    }


def redis_values(spec: DeploySpec, address: str) -> dict[str, Any]:
    """Return the gateway's settings of Redis, which holds the tenants' accounts and cached answers."""
    if spec.redis is None or spec.gateway is None:
        return {}
    return {"redis": f"redis://{address}/0", "accounts": f"redis://{address}/1", **sharing_values(spec)}


def sharing_values(spec: DeploySpec) -> dict[str, Any]:
    """Return the settings by which gateways share Redis.

    Accounts must never be evicted, so Redis refuses writes when it is full, and gateways store no answers
    beyond three quarters of its memory. While Redis fails, each worker admits its part of the limits.
    """
    if spec.redis is None or spec.gateway is None:
        return {}
    workers = whole_number(spec.gateway.settings, "workers", 1, low=1)
    return {
        "response_cache_redis_mib": max(1, spec.redis.memory_mib * 3 // 4),
        "accounts_sharers": spec.gateway.replicas * workers,
    }


def backend_tables(servers: tuple[Server, ...]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the gateway's tables [[backend]] for engines."""
    return [("backend", {"name": each.name, "url": f"http://{each.address}"}) for each in servers]
