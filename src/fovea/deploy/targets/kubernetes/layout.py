"""The folders of a kustomization: a base, components for autoscaling and monitoring, and overlays.

    ROOT/base             namespace, pools, gateways, Redis, network policies
    ROOT/components/...   hpa, keda, monitoring
    ROOT/overlays/...     what is applied: fixed, or hpa and keda if a pool has max_replicas

The targets for Kubernetes, LeaderWorkerSet and KServe differ only in the objects that run a pool's engines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import urlsplit

import yaml

from fovea.core.errors import ConfigError
from fovea.deploy import tracing as ports
from fovea.deploy.formats import fill_template, toml_text, yaml_text
from fovea.deploy.machine import sharing_values
from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.kubernetes import components, tracing, workloads
from fovea.deploy.targets.kubernetes.objects import (
    PORT,
    TRUSTED,
    Manifest,
    check_names,
    ends_tls,
    manifest,
    part_name,
    pool_name,
    selector,
)
from fovea.deploy.targets.kubernetes.pods import ENGINE_KEY, KEYS, TLS
from fovea.deploy.tracing import configs as trace_configs
from fovea.deploy.tracing import has_jaeger, trace_values, tracing_checks


def engine_config(spec: DeploySpec, pool: Pool) -> str:
    """The configuration file of a pool's engines. NetworkPolicies say who may scrape; no key is needed."""
    return toml_text({"open_metrics": True, **_shared(spec, "engine"), **spec.engine_settings(pool)})


def _shared(spec: DeploySpec, component: str) -> dict[str, object]:
    """Settings of engines and gateways: trusted proxies, the certificate, the collector of traces."""
    values: dict[str, object] = {
        "trusted_proxies": list(spec.trusted_proxies or TRUSTED),
        **trace_values(spec, part_name(spec, "collector")),
    }
    if ends_tls(spec, component):
        values |= {"tls_cert": f"{TLS}/tls.crt", "tls_key": f"{TLS}/tls.key"}
    return values


def gateway_config(spec: DeploySpec, suffix: str = "") -> str:
    """The configuration file of the gateways, which find engines by EndpointSlices.

    suffix: what the name of a pool's Service has beyond the pool's.
    """
    services = [f"{spec.effective_namespace}/{pool_name(spec, pool)}{suffix}" for pool in spec.pools]
    sources = [
        {"from": f"kubernetes:{service}:{spec.engine_port}", "api_key_file": f"{ENGINE_KEY}/key"}
        for service in services
    ]
    values = {
        "keys_file": f"{KEYS}/keys.toml",
        **_shared(spec, "gateway"),
        **sharing_values(spec),
        **spec.gateway_settings(),
    }
    return toml_text(values, [("discover", source) for source in sources])


COMPONENT = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
OVERLAY = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
NO_CORE = ("kustomization.yaml", "references.yaml", "certificate.yaml")
NameReferences = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """One target's kustomization.

    root: name of its folder.
    engines: returns the objects that run a pool's engines.
    custom: whether these objects are none of Kubernetes itself, so that its schemas do not know them.
    scaled_kind: API version and kind of the object that autoscalers scale; none: it scales itself.
    service_suffix: what the name of a pool's Service has beyond the pool's.
    rules: whether rules and dashboards are rendered. They are the same whatever runs the engines.
    references: fields with names of ConfigMaps that kustomize does not know: (kind, path).
    groups: whether an engine on several devices is a group of pods, which talk to each other.
    engine_files: whether engines read their settings from files. On Ray they come with the application.
    engine_tls: whether engines can end TLS themselves. KServe and Ray Serve ask them over plain HTTP.
    """

    root: str
    engines: Callable[[DeploySpec, Pool], list[Manifest]]
    custom: bool = False
    scaled_kind: tuple[str, str] | None = ("apps/v1", "Deployment")
    service_suffix: str = ""
    rules: bool = False
    references: NameReferences = ()
    groups: bool = False
    engine_files: bool = True
    engine_tls: bool = True

    def files(self, spec: DeploySpec) -> Files:
        """Return all files. Raises ConfigError for names that clash, and for windows that are too long."""
        check_names(spec)
        if ends_tls(spec, "engine") and not self.engine_tls:
            raise ConfigError(
                f"with tls, engines of the target {self.root} cannot have the certificate; accepted: "
                '[gateway], or [kubernetes] tls_ends = "gateway"',
                param="tls_ends",
            )
        files = {f"{self.root}/base/{path}": text for path, text in self._base(spec).items()}
        parts = self._components(spec)
        for name, objects in parts.items():
            for path, text in objects.items():
                files[f"{self.root}/components/{name}/{path}"] = text
        for name in self.overlays(spec):
            used = [part for part in (name, "monitoring") if part in parts]
            kustomization: Manifest = {**OVERLAY, "resources": ["../../base"]}
            if used:
                kustomization["components"] = [f"../../components/{part}" for part in used]
            files[f"{self.root}/overlays/{name}/kustomization.yaml"] = yaml_text(kustomization)
        return files

    def overlays(self, spec: DeploySpec) -> list[str]:
        """Return the names of the overlays."""
        return ["hpa", "keda"] if self.scaled_kind is not None and components.scaled(spec) else ["fixed"]

    def checks(self, spec: DeploySpec) -> tuple[Check, ...]:
        """Build and lint every overlay, and validate the objects of Kubernetes itself by their schemas."""
        files = [f"{{dir}}/{path}" for path in self.files(spec) if self._is_core(path)]
        builds = [f"{self.root}/overlays/{name}" for name in self.overlays(spec)]
        return (
            Check("kubernetes-validate", ("--strict", *files), f"schemas of {self.root}"),
            *(Check("kubectl", ("kustomize", f"{{dir}}/{build}"), f"build of {build}") for build in builds),
            *(lint(build) for build in builds),
            *tracing_checks(spec, f"{self.root}/base/config/{part_name(spec, '{part}')}.yaml"),
        )

    def _is_core(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        if not name.endswith(".yaml") or name in NO_CORE:
            return False
        if name.startswith("pool-"):
            return not self.custom
        return folder.endswith(("/base", "/hpa")) or name in ("dashboards.yaml", "sources.yaml")

    def _base(self, spec: DeploySpec) -> Files:
        groups = self.groups and (not self.engine_files or any(pool.devices > 1 for pool in spec.pools))
        objects = _objects(spec, groups=groups)
        configs = {}
        for pool in spec.pools:
            objects[f"pool-{pool.name}.yaml"] = self.engines(spec, pool)
            if self.engine_files:
                configs[pool_name(spec, pool)] = ("engine.toml", engine_config(spec, pool))
        if spec.gateway is not None:
            configs[part_name(spec, "gateway")] = ("gateway.toml", gateway_config(spec, self.service_suffix))
        for part, text in trace_configs(spec, part_name(spec, "jaeger")).items():
            configs[part_name(spec, part)] = ("config.yaml", text)
        kustomization: Manifest = {
            **OVERLAY,
            "resources": list(objects),
            "configMapGenerator": [
                {
                    "name": f"{name}-config",
                    "namespace": spec.effective_namespace,
                    "files": [f"{file}=config/{name}{PurePosixPath(file).suffix}"],
                }
                for name, (file, _) in configs.items()
            ],
        }
        files = {path: yaml_text(*found) for path, found in objects.items()}
        if self.references:
            kustomization["configurations"] = ["references.yaml"]
            files["references.yaml"] = yaml_text(_name_references(self.references))
        return {
            "kustomization.yaml": yaml_text(kustomization),
            **files,
            **{f"config/{name}{PurePosixPath(file).suffix}": text for name, (file, text) in configs.items()},
        }

    def _components(self, spec: DeploySpec) -> dict[str, Files]:
        found: dict[str, dict[str, list[Manifest]]] = {}
        pools = components.scaled(spec)
        if pools and self.scaled_kind is not None:
            kind = self.scaled_kind
            found["hpa"] = {"autoscalers.yaml": [components.autoscaler(spec, pool, kind) for pool in pools]}
            found["keda"] = {
                "scaled-objects.yaml": [components.scaled_object(spec, pool, kind) for pool in pools]
            }
        if spec.monitoring is not None:
            found["monitoring"] = {"pod-monitors.yaml": components.pod_monitors(spec, spec.monitoring)}
            if self.rules:
                found["monitoring"]["rules.yaml"] = [components.rules(spec)]
            if self.rules and spec.monitoring.grafana:
                found["monitoring"]["dashboards.yaml"] = components.dashboards(spec)
                if has_jaeger(spec):
                    found["monitoring"]["sources.yaml"] = components.sources(spec)
        return {
            name: {
                "kustomization.yaml": yaml_text({**COMPONENT, "resources": list(objects)}),
                **{path: yaml_text(*each) for path, each in objects.items()},
            }
            for name, objects in found.items()
        }


def lint(*folders: str) -> Check:
    """Return the check of folders by Fovea's own linter."""
    places = [f"{{dir}}/{folder}" for folder in folders]
    return Check("python3", ("-m", "fovea.deploy.lint", *places), f"lint of {', '.join(folders)}")


def _objects(spec: DeploySpec, *, groups: bool) -> dict[str, list[Manifest]]:
    """The objects beside the pools, by file."""
    found = {
        "namespace.yaml": [workloads.namespace(spec)],
        "priorities.yaml": workloads.priorities(spec),
        "accounts.yaml": workloads.accounts(spec),
        "network.yaml": _policies(spec, groups=groups),
        "service.yaml": [workloads.front(spec)],
    }
    if spec.gateway is not None:
        found["gateway.yaml"] = workloads.gateways(spec, spec.gateway)
    if spec.redis is not None:
        found["redis.yaml"] = workloads.redis(spec, spec.redis)
    if spec.tracing is not None:
        found["tracing.yaml"] = tracing.objects(spec, spec.tracing)
    if spec.kubernetes.tls_ends == "pods" and (certificate := workloads.certificate(spec)):
        found["certificate.yaml"] = certificate  # the targets of Gateways render theirs themselves
    return found


def _policies(spec: DeploySpec, *, groups: bool) -> list[Manifest]:
    """Return all NetworkPolicies."""
    collector = urlsplit(spec.otlp_endpoint)
    port = collector.port or (443 if collector.scheme == "https" else 80)
    text = fill_template(
        "kubernetes/network.yaml.j2",
        spec=spec,
        labels=functools.partial(selector, spec),
        port=PORT,
        redis_port=workloads.REDIS_PORT,
        groups=groups,
        collector_port=port if collector.hostname else None,
        downloads=any(pool.weights_gib for pool in spec.pools),
        ports=ports,
    )
    return [
        manifest(spec, "networking.k8s.io/v1 NetworkPolicy", part_name(spec, name), {"spec": body})
        for name, body in yaml.safe_load(text).items()
    ]


def _name_references(references: NameReferences) -> Mapping[str, object]:
    fields = [{"kind": kind, "path": path} for kind, path in references]
    return {"nameReference": [{"kind": "ConfigMap", "version": "v1", "fieldSpecs": fields}]}
