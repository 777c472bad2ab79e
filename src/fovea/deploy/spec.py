"""The spec of a deployment: one TOML file from which every artefact is rendered.

    name = "vlm"
    host = "vlm.example.com"

    [[pool]]                    # engines of one model on one kind of machine
    name = "qwen"
    model = "Qwen/Qwen3-VL-4B-Instruct"
    hardware = "cuda"
    gpu = "A100-80GB"
    replicas = 2
    settings = { max_queue = 64 }   # settings of `fovea serve`

    [gateway]
    replicas = 2

    [redis]
    [monitoring]

Every table but [[pool]] may be left out. Without [gateway], clients reach the pool through the proxy alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fovea import __version__
from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting
from fovea.deploy.accepted import (
    check_file,
    check_host,
    check_image,
    check_label,
    check_machine_type,
    check_model,
    check_model_name,
    check_optional_image,
    check_optional_label,
    check_proxy,
    check_role,
    check_url,
    check_webhook,
)
from fovea.deploy.gpus import GPUS, check_engine, check_profile
from fovea.deploy.monitoring.objectives import Targets
from fovea.deploy.tables import Images, Kubernetes, Tracing

_ENGINE_BODIES_MIB, _GATEWAY_BODIES_MIB = 256, 512
"""Defaults of `max_bodies_mib`, which cannot be below `max_body_mib`."""


OF_ROLES = ("role", "encode_peers", "prefill_peers", "peer_key")


def _check_settings_table(settings: Mapping[str, Any]) -> None:
    """Check the types of settings. Control characters could have a meaning in a file. Raises ConfigError."""
    for name, value in settings.items():
        if name in OF_ROLES:
            raise ConfigError(
                f"settings: {name} gives servers roles, which rendered deployments do not have; accepted: "
                "servers with roles that you deploy yourself (docs/roles.md)",
                param=name,
            )
        for item in value if isinstance(value, list | tuple) else (value,):
            if not isinstance(item, str | bool | int | float) or (
                isinstance(item, str) and not item.isprintable()
            ):
                raise ConfigError(
                    f"settings: {name} is {value!r}; accepted: a printable text, a number, true, false, or a "
                    "list of these",
                    param=name,
                )


MOST_POOLS = 50


def whole_number(settings: Mapping[str, Any], name: str, default: int, *, low: int = 0) -> int:
    """Return a setting that a renderer needs as a number. Raises ConfigError."""
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(
            f"settings: {name} is {value!r}; accepted: a whole number of at least {low}", param=name
        )
    return value


@dataclass(frozen=True, slots=True)
class Pool:
    """Engines that serve one model on one kind of machine; any of them can answer any request for it.

    With hardware cuda an engine has one GPU, one MIG slice, or the GPUs that its settings tensor_parallel and
    pipeline_parallel say.

    settings: settings of `fovea serve` beside those that the renderers set (`read.RENDERED`).
    """

    name: str = setting("", "Name of the pool, a part of the names of its objects.", check=check_label)
    model: str = setting("fovea-tiny", "Folder on the machine, hub id, or fovea-tiny.", check=check_model)
    served_name: str = setting(
        "", "Name of the model for clients; empty: the last part of `model`.", check=check_model_name
    )
    hardware: str = setting(
        "cpu", "What the engines compute on: CPUs, or NVIDIA GPUs.", choices=("cpu", "cuda")
    )
    replicas: int = setting(
        1, "Number of engines; with `max_replicas`, the smallest number.", low=1, high=1000
    )
    max_replicas: int = setting(
        0, "Most engines; 0: no autoscaling, always `replicas`.", or_zero=True, low=1, high=1000
    )
    cpus: int = setting(4, "CPU cores of an engine.", low=1, high=512)
    memory_gib: int = setting(16, "Memory of an engine, in GiB.", low=1, high=8192)
    gpu: str = setting("", "Kind of GPU of the machines.", choices=("", *GPUS))
    mig: str = setting(
        "", "MIG profile instead of a whole GPU, such as 3g.20gb; it must exist on the pool's GPU."
    )
    spot: bool = setting(False, "The pool runs on spot machines, which may be taken away with short notice.")
    spot_notice_s: int = setting(
        30, "Seconds between the notice and the end of a spot machine.", low=10, high=300
    )
    disk_gib: int = setting(
        20, "Disk of an engine for downloaded weights and caches, in GiB.", low=1, high=65536
    )
    weights_gib: int = setting(
        0, "Kubernetes: size of a volume of weights that all engines of the pool share, in GiB; a Job "
        "downloads them once. 0: each engine downloads them.",
        or_zero=True, low=1, high=65536,
    )  # fmt: skip
    weights_image: str = setting(
        "", "Kubernetes: image with the model's files, mounted at `model`, an absolute folder; empty: none.",
        check=check_optional_image,
    )  # fmt: skip
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_replicas and self.max_replicas < self.replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas}; accepted: 0, or {self.replicas} (replicas) and more",
                param="max_replicas",
            )
        _check_settings_table(self.settings)
        self._check_hardware()
        self._check_weights()

    def _check_weights(self) -> None:
        if self.weights_image and not self.model.startswith("/"):
            raise ConfigError(
                f"weights_image is mounted at model, which is {self.model!r}; accepted: an absolute folder, "
                "such as /models/qwen",
                param="weights_image",
            )
        if self.weights_gib and (self.model.startswith(("/", "~")) or "/" not in self.model):
            raise ConfigError(
                f"weights_gib is for downloads, and model is {self.model!r}; accepted: a hub id, or no "
                "weights_gib",
                param="weights_gib",
            )

    def _check_hardware(self) -> None:
        if self.hardware == "cpu":
            for name in ("gpu", "mig"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{name} is {getattr(self, name)!r}, but hardware is cpu; "
                        f'accepted: hardware = "cuda", or no {name}',
                        param=name,
                    )
            return
        check_engine(self.gpu, self.settings)
        if self.mig and not self.gpu:
            raise ConfigError("mig needs gpu, because each GPU has profiles of its own", param="gpu")
        if self.mig:
            check_profile(self.gpu, self.mig)
        if self.mig and self.devices > 1:
            raise ConfigError(
                f"the settings of the pool divide its model among {self.devices} devices, and mig gives an "
                "engine one slice; accepted: no mig, or tensor_parallel 1 and pipeline_parallel 1",
                param="mig",
            )

    @property
    def devices(self) -> int:
        """Devices of an engine: GPUs, or with hardware cpu processes."""
        found = 1
        for name in ("tensor_parallel", "pipeline_parallel"):
            value = self.settings.get(name, 1)
            found *= value if isinstance(value, int) and value > 0 else 1  # others are refused elsewhere
        return found

    @property
    def client_model(self) -> str:
        """The model's name for clients: `served_name`, or the last part of the model's path or hub id."""
        return self.served_name or self.model.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway in front of the pools.

    settings: settings of `fovea gateway` beside those that the renderers set (`read.RENDERED`).
    """

    replicas: int = setting(1, "Gateways.", low=1, high=100)
    cpus: int = setting(1, "CPU cores of a gateway.", low=1, high=64)
    memory_gib: int = setting(1, "Memory of a gateway, in GiB.", low=1, high=64)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self)
        _check_settings_table(self.settings)


@dataclass(frozen=True, slots=True)
class Redis:
    """Redis for limits and answers that all gateways share."""

    memory_mib: int = setting(512, "Ceiling of the data in Redis, in MiB.", low=16, high=1 << 20)
    disk_gib: int = setting(
        0, "Kubernetes: disk of Redis, in GiB; 0: none. On one machine Redis always writes to the disk.",
        or_zero=True, low=1, high=65536,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Monitoring:
    """Prometheus, Alertmanager and Grafana, and where traces go.

    targets: values of `monitoring.objectives.Targets`; the others are predicted (`monitoring.targets`).
    """

    scrape_s: int = setting(15, "Seconds between two scrapes.", low=1, high=300)
    retention_days: int = setting(
        31, "Days for which Prometheus keeps its data; budgets of 30 days need 31.", low=1, high=3650
    )
    alert_webhook: str = setting(
        "", "URL that gets alerts, written in plain text; empty: none is sent. Not for Kubernetes.",
        check=check_webhook,
    )  # fmt: skip
    alert_webhook_file: str = setting(
        "", "In its place: a file on the servers with the URL, which may hold a token. Not for Kubernetes.",
        check=check_file,
    )  # fmt: skip
    runbooks: str = setting(
        "", "URL of your copy of docs/runbooks.md, for the links of alerts; empty: they lead nowhere.",
        check=check_url,
    )  # fmt: skip
    otlp_endpoint: str = setting(
        "", "URL of an OpenTelemetry collector, such as http://collector:4318; empty: no traces.",
        check=check_url,
    )  # fmt: skip
    grafana: bool = setting(True, "Render Grafana with the dashboards.")
    targets: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self)
        Targets(**self.targets)
        if self.alert_webhook and self.alert_webhook_file:
            raise ConfigError(
                "alert_webhook and alert_webhook_file are both given; accepted: one of them",
                param="alert_webhook_file",
            )

    @property
    def alerts(self) -> bool:
        """Whether alerts are sent."""
        return bool(self.alert_webhook or self.alert_webhook_file)


@dataclass(frozen=True, slots=True)
class Stop:
    """How an engine or a gateway is stopped without a failed request.

    The order is: the orchestrator stops sending new requests (`pre_stop_s`), SIGTERM, the port stays open
    (`lame_duck_s`), running requests finish (`drain_s`), the process is killed (`grace_s`).
    """

    pre_stop_s: int = setting(
        5, "Seconds before SIGTERM in which endpoints are removed everywhere.", low=0, high=300
    )
    lame_duck_s: int = setting(5, "Seconds after SIGTERM in which the port stays open.", low=0, high=300)
    drain_s: int = setting(60, "Seconds that running requests have to finish.", low=1, high=3600)
    margin_s: int = setting(10, "Seconds for the process to end after its last request.", low=1, high=300)

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def grace_s(self) -> int:
        """Seconds until the process is killed: longer than everything that comes before it."""
        return self.pre_stop_s + self.lame_duck_s + self.drain_s + self.margin_s

    @property
    def process_s(self) -> int:
        """Seconds between SIGTERM and the kill."""
        return self.grace_s - self.pre_stop_s


@dataclass(frozen=True, slots=True)
class Scale:
    """When pools with `max_replicas` grow and shrink."""

    waiting_per_replica: int = setting(
        8, "A pool grows above this many waiting requests per engine.", low=1, high=10000
    )
    waiting_image_per_replica: int = setting(
        4,
        "A pool grows above this many requests per engine that wait for the vision encoder.",
        low=1,
        high=10000,
    )
    shrink_after_s: int = setting(300, "Seconds of low load after which a pool shrinks.", low=0, high=86400)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Cloud:
    """Places of managed clouds; only their targets read them."""

    project: str = setting("my-project", "Google Cloud project.", check=check_label)
    region: str = setting(
        "us-central1",
        "Region of Vertex AI or SageMaker. If AWS has no such region, SageMaker's script uses the AWS CLI's.",
        check=check_label,
    )
    machine_type: str = setting(
        "", "Machine type; empty: one that fits the first pool.", check=check_machine_type
    )
    role_arn: str = setting(
        "", "ARN of SageMaker's execution role; empty: the variable ROLE of the script.", check=check_role
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class DeploySpec:
    """One deployment.

    pools: at least one.
    gateway, redis, monitoring, tracing: None: not a part of it.
    """

    pools: tuple[Pool, ...]
    name: str = setting("fovea", "Name of the deployment, prefix of all objects.", check=check_label)
    namespace: str = setting("", "Namespace of Kubernetes; empty: the name.", check=check_optional_label)
    host: str = setting("vlm.example.com", "Name under which clients reach it.", check=check_host)
    image: str = setting(
        f"fovea:{__version__}", "Container image for CPUs, by tag or digest.", check=check_image
    )
    image_cuda: str = setting(
        f"fovea:{__version__}-cuda", "Container image for CUDA, by tag or digest.", check=check_image
    )
    max_body_mib: int = setting(
        64, "Largest request in MiB, in every proxy and server alike.", low=1, high=1024
    )
    max_answer_s: int = setting(
        600, "Seconds after which an answer is cut, in every proxy and server alike.", low=10, high=86400
    )
    gateway_class: str = setting(
        "istio", "Class of the Gateway, for the target gateway-api.", check=check_host
    )
    tls: bool = setting(
        False, "Clients use TLS. The proxy decrypts it with the certificate in /etc/fovea/tls; for "
        "Kubernetes see `tls_ends`.",
    )  # fmt: skip
    trusted_proxies: tuple[str, ...] = setting(
        (), "Addresses and networks of your own proxies in front of the deployment, whose X-Forwarded-For is "
        "believed. Empty, in Kubernetes: all private addresses.",
        check=check_proxy,
    )  # fmt: skip
    ipv6: bool = setting(True, "The proxy listens on IPv6, too; false: for machines without it.")
    engine_port: int = setting(8000, "Port of the engines.", low=1, high=65535)
    gateway_port: int = setting(8080, "Port of the gateways.", low=1, high=65535)
    proxy_port: int = setting(
        0, "Port of the proxy; 0: 443 with `tls`, else 80.", or_zero=True, low=1, high=65535
    )
    redirect_port: int = setting(
        80, "With `tls`: port on which the proxy sends plain HTTP to HTTPS; 0: none.",
        or_zero=True, low=1, high=65535,
    )  # fmt: skip
    gateway: Gateway | None = None
    redis: Redis | None = None
    monitoring: Monitoring | None = None
    stop: Stop = field(default_factory=Stop)
    scale: Scale = field(default_factory=Scale)
    cloud: Cloud = field(default_factory=Cloud)
    tracing: Tracing | None = None
    kubernetes: Kubernetes = field(default_factory=Kubernetes)
    images: Images = field(default_factory=Images)

    def __post_init__(self) -> None:
        check_settings(self)
        if not 1 <= len(self.pools) <= MOST_POOLS:
            raise ConfigError(
                f"{len(self.pools)} [[pool]] are given; accepted: 1 to {MOST_POOLS}", param="pool"
            )
        seen: set[str] = set()
        for pool in self.pools:
            if pool.name in seen:
                raise ConfigError(f"[[pool]]: the name {pool.name!r} is given twice", param="name")
            seen.add(pool.name)
        models = {pool.client_model for pool in self.pools}
        if len(models) > 1 and self.gateway is None:
            raise ConfigError(
                f"the pools serve {len(models)} models ({', '.join(sorted(models))}), which needs [gateway]: "
                "a proxy alone does not look at the requested model",
                param="gateway",
            )
        if self.redis is not None and self.gateway is None:
            raise ConfigError(
                "only the gateway uses [redis]; accepted: [redis] together with [gateway]", param="redis"
            )
        if self.tracing is not None and self.otlp_endpoint:
            raise ConfigError(
                "[tracing] renders a collector, and [monitoring] otlp_endpoint names another one; accepted: "
                "one of them",
                param="otlp_endpoint",
            )
        if self.tls and self.redirect_port == self.public_port:
            raise ConfigError(
                f"with tls, proxy_port and redirect_port are both {self.redirect_port}; accepted: another "
                "proxy_port, or redirect_port = 0",
                param="proxy_port",
            )

    def stop_of(self, pool: Pool) -> Stop:
        """Return how engines of a pool stop: on spot machines everything fits into the notice."""
        stop = self.stop
        if not pool.spot or stop.grace_s <= pool.spot_notice_s:
            return stop
        left = pool.spot_notice_s - stop.pre_stop_s - stop.lame_duck_s - stop.margin_s
        if left >= 1:
            return Stop(stop.pre_stop_s, stop.lame_duck_s, left, stop.margin_s)
        fifth = max(1, math.floor(pool.spot_notice_s / 5))
        return Stop(0, fifth, pool.spot_notice_s - 2 * fifth, fifth)

    @property
    def effective_namespace(self) -> str:
        """The namespace of Kubernetes."""
        return self.namespace or self.name

    @property
    def public_port(self) -> int:
        """The port that clients use."""
        return self.proxy_port or (443 if self.tls else 80)

    @property
    def otlp_endpoint(self) -> str:
        """URL of the operator's own collector of traces; "": there is none."""
        return self.monitoring.otlp_endpoint if self.monitoring is not None else ""

    def image_of(self, pool: Pool) -> str:
        """The container image of a pool's engines."""
        return self.image_cuda if pool.hardware == "cuda" else self.image

    def engine_settings(self, pool: Pool) -> dict[str, Any]:
        """The settings of `fovea serve` for an engine of a pool; the pool's own ones win."""
        stop = self.stop_of(pool)
        shared: dict[str, Any] = {
            "model": pool.model,
            "served_model_name": pool.client_model,
            "host": "0.0.0.0",
            "port": self.engine_port,
            "server_names": (self.host,),
            "max_body_mib": self.max_body_mib,
            "request_timeout": float(self.max_answer_s),
            "drain_seconds": float(stop.drain_s),
            "lame_duck_s": float(stop.lame_duck_s),
            "device": "cuda" if pool.hardware == "cuda" else "cpu",
        }
        if self.max_body_mib > _ENGINE_BODIES_MIB:
            shared["max_bodies_mib"] = self.max_body_mib
        if pool.settings.get("simulate"):  # `fovea serve --simulate` has no model and no device
            del shared["model"], shared["device"]
        return {**shared, **pool.settings}

    def gateway_settings(self) -> dict[str, Any]:
        """The settings of `fovea gateway`; the spec's own ones win. Backends are the renderers' to add."""
        own = self.gateway.settings if self.gateway is not None else {}
        shared: dict[str, Any] = {
            "host": "0.0.0.0",
            "port": self.gateway_port,
            "server_names": (self.host,),
            "max_body_mib": self.max_body_mib,
            "total_s": float(self.max_answer_s),
            "drain_seconds": float(self.stop.drain_s),
            "lame_duck_s": float(self.stop.lame_duck_s),
        }
        if self.max_body_mib > _GATEWAY_BODIES_MIB:
            shared["max_bodies_mib"] = self.max_body_mib
        return {**shared, **own}
