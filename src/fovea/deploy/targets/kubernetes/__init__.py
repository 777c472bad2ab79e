"""Kubernetes: Deployments in a kustomization (`layout`), and what others install for it.

prometheus-adapter/values.yaml gives the HorizontalPodAutoscaler its metrics, and gpu-operator/mig-parted.yaml
divides GPUs.
"""

from __future__ import annotations

from fovea.deploy.formats import yaml_text
from fovea.deploy.gpus import most_instances
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.kubernetes import components, workloads
from fovea.deploy.targets.kubernetes.layout import Layout, lint
from fovea.deploy.targets.kubernetes.objects import Manifest

CONFIG_MAP, NAMESPACE = "fovea-mig-parted", "gpu-operator"
MIG_COMMENT = """For the GPU operator: migManager.config.name=fovea-mig-parted and mig.strategy=mixed.
A node gets a layout by its label: kubectl label node NODE nvidia.com/mig.config=NAME"""


def mig_layouts(spec: DeploySpec) -> dict[str, tuple[str, dict[str, int]]]:
    """Return a layout for each GPU and profile of the pools: the whole GPU divided into that profile."""
    found = {}
    for pool in spec.pools:
        if pool.mig:
            name = f"{pool.gpu}-{pool.mig}".lower().replace("+", ".")
            found[name] = (pool.gpu, {pool.mig: most_instances(pool.gpu, pool.mig)})
    return dict(sorted(found.items()))


def mig_config_map(spec: DeploySpec) -> Manifest:
    """The ConfigMap of the layouts. They are for nodes whose GPUs are all of the named kind."""
    configs: Manifest = {
        "all-disabled": [{"devices": "all", "mig-enabled": False}],
        **{
            name: [{"devices": "all", "mig-enabled": True, "mig-devices": profiles}]
            for name, (_, profiles) in mig_layouts(spec).items()
        },
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": CONFIG_MAP,
            "namespace": NAMESPACE,
            # The linter checks the layouts against these GPUs; the MIG manager does not read them.
            "annotations": {f"fovea/gpu.{name}": gpu for name, (gpu, _) in mig_layouts(spec).items()},
        },
        "data": {"config.yaml": yaml_text({"version": "v1", "mig-configs": configs})},
    }


ROOT = "kubernetes"
LAYOUT = Layout(ROOT, workloads.engines, rules=True)


def render(spec: DeploySpec) -> Files:
    """Return all files. Raises ConfigError for names that clash, and for windows that are too long."""
    files = LAYOUT.files(spec)
    if components.scaled(spec):
        files[f"{ROOT}/prometheus-adapter/values.yaml"] = yaml_text(components.adapter_values(spec))
    if mig_layouts(spec):
        files[f"{ROOT}/gpu-operator/mig-parted.yaml"] = yaml_text(mig_config_map(spec), comment=MIG_COMMENT)
    return files


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the checks of the kustomization and of the MIG layouts."""
    return (*LAYOUT.checks(spec), *([lint(f"{ROOT}/gpu-operator")] if mig_layouts(spec) else []))
