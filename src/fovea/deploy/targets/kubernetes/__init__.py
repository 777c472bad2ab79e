"""Kubernetes: Deployments in a kustomization (`layout`), and what others install for it.

prometheus-adapter/values.yaml gives the HorizontalPodAutoscaler its metrics, and gpu-operator/mig-parted.yaml
divides GPUs.
"""

from __future__ import annotations

from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.kubernetes import mig, scaling, workloads
from fovea.deploy.targets.kubernetes.layout import Layout, lint
from fovea.deploy.yaml_text import yaml_text

ROOT = "kubernetes"
LAYOUT = Layout(ROOT, workloads.engines, rules=True)


def render(spec: DeploySpec) -> Files:
    """Return all files. Raises ConfigError for names that clash, and for windows that are too long."""
    files = LAYOUT.files(spec)
    if scaling.scaled(spec):
        files[f"{ROOT}/prometheus-adapter/values.yaml"] = yaml_text(scaling.adapter_values(spec))
    if mig.layouts(spec):
        files[f"{ROOT}/gpu-operator/mig-parted.yaml"] = yaml_text(mig.config_map(spec), comment=mig.COMMENT)
    return files


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the checks of the kustomization and of the MIG layouts."""
    return (*LAYOUT.checks(spec), *([lint(f"{ROOT}/gpu-operator")] if mig.layouts(spec) else []))
