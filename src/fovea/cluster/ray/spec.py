"""The spec of a cluster: one TOML file with models, the roles of their engines, and where clients come in.

    address = "auto"                # a Ray that runs; "": `up` starts one on this machine, and stays with it

    [ingress]
    port = 8000

    [[model]]
    name = "qwen"
    model = "Qwen/Qwen3-VL-4B-Instruct"
    settings = { max_queue = 64 }   # settings of `fovea serve`, for all roles

    [[model.role]]                  # without one, the model has the role `all`
    role = "prefill-decode"
    gpus = 1
    gpu = "L40S"
    scale = { replicas_min = 1, replicas_max = 4 }

    [[model.role]]
    role = "encode"
    cpus = 4

This module does not import ray.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fovea.cluster.scaling import ScaleSettings
from fovea.core.config_files import check_keys, read_toml, settings_table, tables
from fovea.core.errors import ConfigError
from fovea.core.findings import Findings
from fovea.core.settings import check_settings, setting, settings_of

ROLES = ("all", "encode", "prefill", "prefill-decode", "decode")
ANSWERING = ("all", "prefill-decode", "decode")
"""Roles whose engines answer clients. A model has exactly one of them."""
PEERS = {"prefill-decode": ("encode",), "decode": ("prefill", "encode"), "prefill": ("encode",)}
"""The roles that an engine of a role asks for work."""
OWN_SETTINGS = (
    "host", "port", "model", "served_model_name", "simulate", "role", "encode_peers", "prefill_peers",
    "peer_key", "api_key", "admin_key", "metrics_key", "config", "data_parallel", "drain_seconds",
    "lame_duck_s", "tls_cert", "tls_key", "transfer_host", "server_names",
)  # fmt: skip
"""Settings of `fovea serve` that a replica sets itself, or that are secrets."""
LOCATIONS = ("head", "every-node")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,40}[a-z0-9])?")
_ADDRESS = re.compile(r"|auto|[A-Za-z0-9.\-]+:[0-9]{1,5}")


def _check_name(value: str) -> str:
    words = "1 to 42 lower-case letters, digits, dots and hyphens, with a letter or digit at both ends"
    return "" if _NAME.fullmatch(value) else words


def _check_address(value: str) -> str:
    return "" if _ADDRESS.fullmatch(value) else '"auto", HOST:PORT of a running Ray, or nothing'


@dataclass(frozen=True, slots=True)
class Ingress:
    """The proxies to which clients connect, and how these choose a replica."""

    host: str = setting("0.0.0.0", "Address on which the proxies listen.")
    port: int = setting(8000, "Port on which the proxies listen.", low=1, high=65535)
    haproxy: bool = setting(
        True,
        "Whether HAProxy is the ingress, which Ray's packages bring for Linux. false: Ray Serve's own proxy, "
        "which takes several times as long per request.",
    )
    location: str = setting(
        "every-node", "Nodes with a proxy: the head, or every node with a replica.", choices=LOCATIONS
    )
    balance: float = setting(
        2.0,
        "A replica gets at most this many times the average number of requests; others go to the next one.",
        low=1.0,
        high=100.0,
    )
    retry_kib: int = setting(
        256,
        "Requests of up to this size are sent to another replica if theirs ends before the first byte of its "
        "answer. HAProxy holds them in memory. Larger ones are sent again only if it could not be reached.",
        low=16,
        high=65536,
    )
    deregister_s: float = setting(
        10.0,
        "Seconds for which a replica that is stopped still accepts requests, until all proxies know it.",
        low=1,
        high=600,
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Role:
    """Engines of one model with one role, which are scaled together.

    resources: further resources of Ray that a replica needs, by name.
    settings: settings of `fovea serve` for this role, beside those of the model.
    scale: fewest and most replicas, and when their number changes.
    """

    role: str = setting("all", "The role of the engines (docs/roles.md).", choices=ROLES)
    cpus: float = setting(1.0, "CPU cores of a replica; of each rank, if it has several.", low=0, high=1024)
    gpus: float = setting(
        0.0, "GPUs of a replica, or a part of one; of each rank, if it has several.", low=0, high=16
    )
    gpu: str = setting(
        "", "Kind of the GPUs, as in `fovea plan`: a replica that does not fit into its memory is refused."
    )
    memory_gib: float = setting(
        0.0, "Memory of a replica in GiB; 0: as much as its model and caches need.", low=0, high=65536
    )
    resources: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    scale: ScaleSettings = field(default_factory=ScaleSettings)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ConfigError(
                f"gpus is {self.gpus:g}; accepted: a whole number, or a part of one GPU below 1", param="gpus"
            )
        if self.gpu and not self.gpus:
            raise ConfigError("gpu names a kind of GPU, but gpus is 0; accepted: gpus above 0", param="gpu")
        for name, value in self.resources.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(
                    f"resources: {name} is {value!r}; accepted: a number above 0", param="resources"
                )
        if self.scale.replicas_min < 1:
            raise ConfigError(
                "scale: replicas_min is 0; accepted: 1 and more, because the signals that add a replica are "
                "those of engines that run",
                param="replicas_min",
            )

    @property
    def answers(self) -> bool:
        """Whether these engines answer clients."""
        return self.role in ANSWERING


@dataclass(frozen=True, slots=True)
class Model:
    """One model: an application of Ray Serve, with a deployment for each role.

    roles: one of them answers clients.
    settings: settings of `fovea serve` for all roles.
    """

    name: str = setting("fovea", "Name of the model for clients, and of the application.", check=_check_name)
    model: str = setting("fovea-tiny", "Folder on every node, hub id, or fovea-tiny.")
    simulate: bool = setting(False, "Engines without a model, with the latencies of a cost model.")
    drain_s: float = setting(
        600.0, "Seconds that running answers have to finish when a replica is stopped.", low=1, high=3600
    )
    surge: bool = setting(
        True,
        "Whether an update starts new replicas before it stops old ones, if there is room for one more. "
        "Otherwise it stops old ones first: a role with one replica is away for as long as one starts.",
    )
    roles: tuple[Role, ...] = (Role(),)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self)
        names = [role.role for role in self.roles]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"the role {name} is given twice", param="role")
        answering = [name for name in names if name in ANSWERING]
        if len(answering) != 1:
            raise ConfigError(
                f"{len(answering)} of the roles answer clients; accepted: one of {', '.join(ANSWERING)}",
                param="role",
            )
        self._check_peers(set(names))
        if self.simulate and names != ["all"]:
            raise ConfigError("a simulated model has no peers; accepted: the role all", param="simulate")
        for role in self.roles:
            devices = self.ranks(role)
            if devices > 1 and self.simulate:
                raise ConfigError(
                    f"tensor_parallel times pipeline_parallel is {devices}; accepted with simulate: 1",
                    param="simulate",
                )

    def _check_peers(self, names: set[str]) -> None:
        asked = {peer for name in names for peer in PEERS.get(name, ())}
        if idle := names - asked - set(ANSWERING):
            raise ConfigError(
                f"no engine asks those with the role {min(idle)}; accepted beside it: "
                f"{', '.join(name for name, peers in PEERS.items() if min(idle) in peers)}",
                param="role",
            )
        for name, peers in (("prefill-decode", "encode"), ("decode", "prefill")):
            if name in names and peers not in names:
                raise ConfigError(f"the role {name} asks engines with the role {peers}", param="role")

    @property
    def ingress(self) -> Role:
        """The role that answers clients."""
        return next(role for role in self.roles if role.answers)

    def engine_settings(self, role: Role) -> dict[str, Any]:
        """The settings of `fovea serve` that the file gives engines of a role."""
        return {**self.settings, **role.settings}

    def ranks(self, role: Role) -> int:
        """The number of processes among which an engine of a role is divided."""
        settings, ranks = self.engine_settings(role), 1
        for name in ("tensor_parallel", "pipeline_parallel"):
            value = settings.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"settings: {name} is {value!r}; accepted: 1 and more", param=name)
            ranks *= value
        return ranks


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The models of a cluster, and where clients come in."""

    models: tuple[Model, ...]
    address: str = setting(
        "",
        'Address of a running Ray: "auto" on one of its nodes, or HOST:PORT. Empty: `fovea cluster up` '
        "starts one on this machine.",
        check=_check_address,
    )
    ingress: Ingress = field(default_factory=Ingress)

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.models:
            raise ConfigError("no model is given; accepted: a table [[model]] for each", param="model")
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"[[model]]: the name {name!r} is given twice", param="name")

    def prefix(self, model: Model) -> str:
        """The path under which a model has its API: "/", or with several models /NAME."""
        return "/" if len(self.models) == 1 else f"/{model.name}"

    @property
    def drain_s(self) -> float:
        """The longest time for which a running answer is waited for."""
        return max(model.drain_s for model in self.models)


def read_spec(path: Path, known: Collection[str]) -> ClusterSpec:
    """Read a spec file. known: names of the settings of `fovea serve`. Raises ConfigError."""
    values = read_toml(path, param="spec")
    with values.errors():
        return spec_of(values, known)


def spec_of(values: Mapping[str, Any], known: Collection[str]) -> ClusterSpec:
    """Return the spec of parsed TOML. known: as in `read_spec`. Raises ConfigError."""
    findings, models, ingress = Findings(), [], Ingress()
    with findings.part():
        check_keys("", values, ["address", "ingress", "model"])
    entries: list[dict[str, Any]] = []
    with findings.part():
        entries = tables("", values, "model")
    for number, table in enumerate(entries, 1):
        with findings.part("model", number):
            models.append(_model(f"[[model]] number {number}", table, known))
    with findings.part("ingress"):
        ingress = settings_table(Ingress, "[ingress]", values.get("ingress", {}))
    findings.check()
    own = {name: values[name] for name in ("address",) if name in values}
    return ClusterSpec(tuple(models), ingress=ingress, **own)


def _model(where: str, values: Mapping[str, Any], known: Collection[str]) -> Model:
    findings, roles = Findings(), []
    settings: dict[str, Any] = {}
    with findings.part("settings"):
        settings = _engine_settings(f"{where} settings", values.get("settings", {}), known)
    entries: list[dict[str, Any]] = []
    with findings.part():
        entries = tables(where, values, "role")
    for number, table in enumerate(entries, 1):
        with findings.part("role", number):
            roles.append(_role(f"{where}, [[model.role]] number {number}", table, known))
    own = {name: value for name, value in values.items() if name != "role"}
    if findings.errors:
        with findings.part():  # rules about roles and settings together would say what is said already
            check_keys(where, own, [entry.name for entry in settings_of(Model, nested=False)] + ["settings"])
    findings.check()
    return settings_table(Model, where, own, settings=settings, roles=tuple(roles) or (Role(),))


def _role(where: str, values: Mapping[str, Any], known: Collection[str]) -> Role:
    findings, settings, scale = Findings(), {}, ScaleSettings()
    with findings.part("settings"):
        settings = _engine_settings(f"{where} settings", values.get("settings", {}), known)
    with findings.part("scale"):
        scale = settings_table(ScaleSettings, f"{where} scale", values.get("scale", {}))
    resources = values.get("resources", {})
    with findings.part():
        if not isinstance(resources, Mapping):
            raise ConfigError(
                f"{where}: resources is {resources!r}; accepted: a table of numbers", param="resources"
            )
    findings.check()
    return settings_table(Role, where, values, settings=settings, scale=scale, resources=resources)


def _engine_settings(where: str, values: Any, known: Collection[str]) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is {values!r}; accepted: a table of settings", param="settings")
    for name, value in values.items():
        if name in OWN_SETTINGS:
            raise ConfigError(
                f"{where} holds {name}, which each replica gets from the rest of the spec, or from a "
                "variable if it is a secret",
                param=name,
            )
        items = value if isinstance(value, list) else (value,)
        if not all(isinstance(item, str | bool | int | float) for item in items):
            raise ConfigError(
                f"{where}: {name} is {value!r}; accepted: a text, a number, true, false, or a list of these",
                param=name,
            )
    check_keys(where, values, [name for name in known if name not in OWN_SETTINGS])
    return values
