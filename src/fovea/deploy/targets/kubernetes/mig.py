"""The configuration of NVIDIA's MIG manager, for the GPUs of the pools."""

from __future__ import annotations

from fovea.deploy.mig_layout import most
from fovea.deploy.spec import DeploySpec
from fovea.deploy.targets.kubernetes.objects import Manifest
from fovea.deploy.yaml_text import yaml_text

CONFIG_MAP, NAMESPACE = "fovea-mig-parted", "gpu-operator"
COMMENT = """For the GPU operator: migManager.config.name=fovea-mig-parted and mig.strategy=mixed.
A node gets a layout by its label: kubectl label node NODE nvidia.com/mig.config=NAME"""


def layouts(spec: DeploySpec) -> dict[str, tuple[str, dict[str, int]]]:
    """Return a layout for each GPU and profile of the pools: the whole GPU divided into that profile."""
    found = {}
    for pool in spec.pools:
        if pool.mig:
            name = f"{pool.gpu}-{pool.mig}".lower().replace("+", ".")
            found[name] = (pool.gpu, {pool.mig: most(pool.gpu, pool.mig)})
    return dict(sorted(found.items()))


def config_map(spec: DeploySpec) -> Manifest:
    """The ConfigMap of the layouts. They are for nodes whose GPUs are all of the named kind."""
    configs: Manifest = {
        "all-disabled": [{"devices": "all", "mig-enabled": False}],
        **{
            name: [{"devices": "all", "mig-enabled": True, "mig-devices": profiles}]
            for name, (_, profiles) in layouts(spec).items()
        },
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": CONFIG_MAP,
            "namespace": NAMESPACE,
            # The linter checks the layouts against these GPUs; the MIG manager does not read them.
            "annotations": {f"fovea/gpu.{name}": gpu for name, (gpu, _) in layouts(spec).items()},
        },
        "data": {"config.yaml": yaml_text({"version": "v1", "mig-configs": configs})},
    }
