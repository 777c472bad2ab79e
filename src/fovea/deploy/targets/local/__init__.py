"""The whole deployment as processes of this machine, without containers.

`run.sh` starts everything, waits until it is ready, starts a service again that ends by itself, and stops all
in order. Logs, process ids and data are in the folder `state` beside it.
"""

from __future__ import annotations

from fovea.deploy.formats import fill_template, toml_text
from fovea.deploy.front import front_of
from fovea.deploy.machine import (
    LOOPBACK,
    backend_tables,
    behind_proxy,
    check_ports,
    engine_values,
    engines,
    gateway_values,
    gateways,
    service_ports,
)
from fovea.deploy.monitoring.files import (
    ALERTMANAGER_PATH,
    PROMETHEUS_PATH,
    monitoring_checks,
    prometheus_files,
)
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files
from fovea.deploy.targets import envoy, nginx

COMMENT = "Rendered by `fovea deploy render --target local`. docs/deployment.md explains it."


def render(spec: DeploySpec) -> Files:
    """Return run.sh and the configuration of every process.

    Raises ConfigError if two processes would have one port.
    """
    check_ports(spec)
    ports = service_ports(spec)
    front = front_of(spec, behind_proxy(spec), address=LOOPBACK)
    files = {
        "run.sh": _script(spec),
        "state/README": "Logs, process ids and data of the services that run.sh starts.\n",
        "nginx.conf": nginx.configuration(front, temporary="state/nginx"),
        "envoy.yaml": envoy.configuration(front, admin_port=ports["envoy-admin"]),
        **prometheus_files(
            spec,
            [each.address for each in engines(spec)],
            [each.address for each in gateways(spec)],
            f"{LOOPBACK}:{ports['alertmanager']}",
        ),
    }
    for engine in engines(spec):
        files[f"{engine.name}.toml"] = toml_text(engine_values(spec, engine), comment=COMMENT)
    for gateway in gateways(spec):
        values = gateway_values(spec, gateway, f"{LOOPBACK}:{ports['redis']}")
        files[f"{gateway.name}.toml"] = toml_text(values, backend_tables(engines(spec)), comment=COMMENT)
    if spec.redis is not None:
        files["redis.conf"] = redis_configuration(
            spec, port=ports["redis"], address=LOOPBACK, folder="./state/redis"
        )
    return files


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the commands that check the rendered files."""
    return (
        Check("shellcheck", ("--shell", "sh", "{dir}/run.sh"), "ShellCheck finds no fault in run.sh"),
        nginx.check("nginx.conf", tls=spec.tls),
        envoy.check("envoy.yaml", tls=spec.tls),
        *monitoring_checks(spec),
    )


def redis_configuration(spec: DeploySpec, *, port: int, address: str, folder: str) -> str:
    """Return redis.conf.

    port, address: where Redis listens.
    folder: folder of its data.
    """
    assert spec.redis is not None
    return fill_template(
        "local/redis.conf.j2", port=port, address=address, folder=folder, memory_mib=spec.redis.memory_mib
    )


def _script(spec: DeploySpec) -> str:
    ready = [f"http://{each.address}/ready" for each in (*engines(spec), *gateways(spec))]
    scheme = "https" if spec.tls else "http"
    return fill_template(
        "local/run.sh.j2",
        spec=spec,
        ports=service_ports(spec),
        prometheus=PROMETHEUS_PATH,
        alertmanager=ALERTMANAGER_PATH if spec.monitoring and spec.monitoring.alerts else "",
        engines=[each.name for each in engines(spec)],
        gateways=[each.name for each in gateways(spec)],
        ready=[*ready, f"{scheme}://{LOOPBACK}:{spec.public_port}/ready"],
        engine_grace_s=max(spec.stop_of(pool).process_s for pool in spec.pools),
        gateway_grace_s=spec.stop.process_s,
        proxy_grace_s=spec.stop.drain_s + spec.stop.margin_s,
    )
