"""Kubernetes: a kustomization with a base, components for autoscaling and monitoring, and overlays.

    kubernetes/base             namespace, pools, gateways, Redis, network policies
    kubernetes/components/...   hpa, keda, monitoring
    kubernetes/overlays/...     what is applied: fixed, or hpa and keda if a pool has max_replicas
    kubernetes/prometheus-adapter, kubernetes/gpu-operator   values and layouts for what others install
"""

from __future__ import annotations

from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.kubernetes import cluster, config, mig, monitoring, network, scaling, workloads
from fovea.deploy.targets.kubernetes.objects import Manifest, check_names, part_name, pool_name
from fovea.deploy.yaml_text import yaml_text

ROOT = "kubernetes"
COMPONENT = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
OVERLAY = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}


def render(spec: DeploySpec) -> Files:
    """Return all files. Raises ConfigError for names that clash, and for windows that are too long."""
    check_names(spec)
    files = {f"{ROOT}/base/{path}": text for path, text in _base(spec).items()}
    parts = _components(spec)
    for name, objects in parts.items():
        for path, text in objects.items():
            files[f"{ROOT}/components/{name}/{path}"] = text
    for name in overlays(spec):
        used = [part for part in (name, "monitoring") if part in parts]
        kustomization: Manifest = {**OVERLAY, "resources": ["../../base"]}
        if used:
            kustomization["components"] = [f"../../components/{part}" for part in used]
        files[f"{ROOT}/overlays/{name}/kustomization.yaml"] = yaml_text(kustomization)
    if scaling.scaled(spec):
        files[f"{ROOT}/prometheus-adapter/values.yaml"] = yaml_text(scaling.adapter_values(spec))
    if mig.layouts(spec):
        files[f"{ROOT}/gpu-operator/mig-parted.yaml"] = yaml_text(mig.config_map(spec), comment=mig.COMMENT)
    return files


def overlays(spec: DeploySpec) -> list[str]:
    """Names of the overlays."""
    return ["hpa", "keda"] if scaling.scaled(spec) else ["fixed"]


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Build every overlay, validate every object of Kubernetes itself, and lint each overlay as a whole."""
    custom = (f"{ROOT}/components/keda/", f"{ROOT}/components/monitoring/pod-", f"{ROOT}/prometheus-adapter/")
    core = [
        f"{{dir}}/{path}"
        for path in render(spec)
        if path.endswith(".yaml") and not path.endswith("kustomization.yaml") and not path.startswith(custom)
    ]
    return (
        Check("kubernetes-validate", ("--strict", *core), "Kubernetes: schemas of all objects"),
        *(
            Check("kubectl", ("kustomize", f"{{dir}}/{ROOT}/overlays/{name}"), f"Kubernetes: build of {name}")
            for name in overlays(spec)
        ),
        *(lint(f"{ROOT}/overlays/{name}") for name in overlays(spec)),
        *([lint(f"{ROOT}/gpu-operator")] if mig.layouts(spec) else []),
    )


def lint(*folders: str) -> Check:
    """Return the check of folders by Fovea's own linter."""
    places = [f"{{dir}}/{folder}" for folder in folders]
    return Check("python3", ("-m", "fovea.deploy.lint", *places), f"lint of {', '.join(folders)}")


def _base(spec: DeploySpec) -> Files:
    objects: dict[str, list[Manifest]] = {
        "namespace.yaml": [cluster.namespace(spec)],
        "priorities.yaml": cluster.priorities(spec),
        "accounts.yaml": cluster.accounts(spec),
        "network.yaml": network.policies(spec),
        "service.yaml": [workloads.front(spec)],
    }
    configs = {}
    for pool in spec.pools:
        objects[f"pool-{pool.name}.yaml"] = workloads.engines(spec, pool)
        configs[pool_name(spec, pool)] = ("engine.toml", config.engine_config(spec, pool))
    if spec.gateway is not None:
        objects["gateway.yaml"] = workloads.gateways(spec, spec.gateway)
        configs[part_name(spec, "gateway")] = ("gateway.toml", config.gateway_config(spec))
    if spec.redis is not None:
        objects["redis.yaml"] = cluster.redis(spec, spec.redis)
    generators = [
        {
            "name": f"{name}-config",
            "namespace": spec.effective_namespace,
            "files": [f"{file}=config/{name}.toml"],
        }
        for name, (file, _) in configs.items()
    ]
    kustomization = {**OVERLAY, "resources": list(objects), "configMapGenerator": generators}
    return {
        "kustomization.yaml": yaml_text(kustomization),
        **{path: yaml_text(*found) for path, found in objects.items()},
        **{f"config/{name}.toml": text for name, (_, text) in configs.items()},
    }


def _components(spec: DeploySpec) -> dict[str, Files]:
    found: dict[str, dict[str, list[Manifest]]] = {}
    if pools := scaling.scaled(spec):
        found["hpa"] = {"autoscalers.yaml": [scaling.autoscaler(spec, pool) for pool in pools]}
        found["keda"] = {"scaled-objects.yaml": [scaling.scaled_object(spec, pool) for pool in pools]}
    if spec.monitoring is not None:
        found["monitoring"] = {"pod-monitors.yaml": monitoring.pod_monitors(spec, spec.monitoring)}
    return {
        name: {
            "kustomization.yaml": yaml_text({**COMPONENT, "resources": list(objects)}),
            **{path: yaml_text(*each) for path, each in objects.items()},
        }
        for name, objects in found.items()
    }
