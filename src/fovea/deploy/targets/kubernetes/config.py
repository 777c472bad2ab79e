"""The configuration files of engines and gateways in a cluster."""

from __future__ import annotations

from fovea.deploy.machine import sharing_values
from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.targets.kubernetes.objects import pool_name
from fovea.deploy.targets.kubernetes.pods import ENGINE_KEY
from fovea.deploy.toml_text import toml_text


def engine_config(spec: DeploySpec, pool: Pool) -> str:
    """The configuration file of a pool's engines. NetworkPolicies say who may scrape; no key is needed."""
    return toml_text({"open_metrics": True, **spec.engine_settings(pool)})


def gateway_config(spec: DeploySpec, suffix: str = "") -> str:
    """The configuration file of the gateways, which find engines by EndpointSlices.

    suffix: what the name of a pool's Service has beyond the pool's.
    """
    services = [f"{spec.effective_namespace}/{pool_name(spec, pool)}{suffix}" for pool in spec.pools]
    sources = [
        {"from": f"kubernetes:{service}:{spec.engine_port}", "api_key_file": f"{ENGINE_KEY}/key"}
        for service in services
    ]
    values = {**sharing_values(spec), **spec.gateway_settings()}
    return toml_text(values, [("discover", source) for source in sources])
