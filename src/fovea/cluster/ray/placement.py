"""The bytes and devices that a replica needs, and the nodes where it fits. It knows no Ray, only numbers.

    on CPUs      weights + KV pool + encoder cache + process        the resource `memory` of Ray
    on GPUs      weights + KV pool + encoder cache + 5% of work     checked against the memory of the GPUs
                 process                                            the resource `memory` of Ray
    N ranks      the decoder and the KV pool divided by N; a rank has a bundle of its own, and the vision
                 tower, the encoder cache and the process are counted for each

Weights come from the planner. A role `encode` has the vision tower alone, and no KV pool to speak of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fovea.cluster.ray.spec import ClusterSpec, Model, Role
from fovea.core.errors import ConfigError
from fovea.deploy.ray_serve import CPU, GPU, MEMORY
from fovea.planner.capacity import TOWER, WORK_SHARE
from fovea.planner.hardware import find, known_hardware
from fovea.planner.memory import weight_bytes
from fovea.planner.precision import recipe
from fovea.planner.shape import ModelShape

MIB, GIB = 1 << 20, 1 << 30
KV_MIB = 1024
"""KV pool on CPUs, unless the spec sets `kv_cache_mib`: without it an engine takes a part of free memory."""
EMBED_MIB = 256
"""Default of the setting `embed_cache_mib`."""
PROCESS = GIB
"""Bytes of an engine's process beside its model: the interpreter, torch, the tokenizer, requests."""
SIMULATED = 320 * MIB
"""Bytes of a simulated engine, which has no model, and of its replica."""
Bundle = dict[str, float]
"""Resources of Ray by name; memory in bytes."""


class Needs(NamedTuple):
    """The bytes that one rank of a replica needs.

    weights, kv, caches, process: where they go.
    device: what has to fit into the GPUs of a rank; 0: the engine computes on CPUs.
    host: memory of the node.
    """

    weights: int
    kv: int
    caches: int
    process: int
    device: int
    host: int


def needs(model: Model, role: Role, shape: ModelShape | None) -> Needs:
    """Return the bytes of one rank. shape: of the model; None: it is simulated. Raises ConfigError."""
    if model.simulate or shape is None:
        return Needs(0, 0, 0, SIMULATED, 0, SIMULATED)
    settings = model.engine_settings(role)
    if 0 < role.gpus < 1 and role.role != "encode" and not settings.get("kv_cache_mib"):
        raise ConfigError(
            f"model {model.name}, role {role.role}: gpus is {role.gpus:g}, and without kv_cache_mib an "
            "engine takes all memory that its GPU has left; accepted: with kv_cache_mib, or whole GPUs",
            param="kv_cache_mib",
        )
    ranks = model.ranks(role)
    quantization = str(settings.get("quantization", "none"))
    precision = recipe("none" if quantization == "dequantize" else quantization, _dtype(settings))
    parts = weight_bytes(shape, precision)
    tower = sum(parts.get(part, 0) for part in TOWER)
    decoder = 0 if role.role == "encode" and shape.cross is None else sum(parts.values()) - tower
    kv = (
        0
        if role.role == "encode"
        else (_mib(settings, "kv_cache_mib", 0) or (0 if role.gpus else KV_MIB * MIB))
    )
    weights, caches = tower + decoder // ranks, _mib(settings, "embed_cache_mib", EMBED_MIB)
    own = weights + kv // ranks + caches
    if role.gpus:
        return Needs(weights, kv // ranks, caches, PROCESS, round(own * (1 + WORK_SHARE)), PROCESS)
    return Needs(weights, kv // ranks, caches, PROCESS, 0, own + PROCESS)


def _dtype(settings: Mapping[str, object]) -> str:
    dtype = str(settings.get("dtype", "auto"))
    return dtype if dtype in ("float32", "float16", "bfloat16") else "bfloat16"


def _mib(settings: Mapping[str, object], name: str, default: int) -> int:
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"settings: {name} is {value!r}; accepted: a whole number of MiB", param=name)
    return value * MIB


def bundles(model: Model, role: Role, needed: Needs) -> list[Bundle]:
    """Return the resources of a replica, a bundle for each rank.

    Raises ConfigError if the model does not fit into the GPUs that the role names.
    """
    if role.gpu:
        _check_device(model, role, needed)
    memory = round(role.memory_gib * GIB) or needed.host
    if memory < needed.host:
        raise ConfigError(
            f"model {model.name}, role {role.role}: memory_gib is {role.memory_gib:g}, and {words(needed)}; "
            f"accepted: {needed.host / GIB:.2f} and more, or 0 for as much as is needed",
            param="memory_gib",
        )
    one: Bundle = {CPU: role.cpus, MEMORY: memory, **role.resources}
    if role.gpus:
        one[GPU] = role.gpus
    return [{name: value for name, value in one.items() if value}] * model.ranks(role)


def _check_device(model: Model, role: Role, needed: Needs) -> None:
    device = find(role.gpu, [one for one in known_hardware() if one.kind == "gpu"])
    usable = device.usable_bytes * min(role.gpus, 1.0)
    if needed.device > usable:
        raise ConfigError(
            f"model {model.name}, role {role.role}: a replica fits nowhere: {words(needed)}, and "
            f"{role.gpus:g} {device.name} has {usable / GIB:.1f} GiB for it; accepted: a larger GPU, "
            "tensor_parallel, quantization, or smaller caches",
            param="gpu",
        )


def words(needed: Needs) -> str:
    """Say what a rank needs its memory for."""
    parts = {
        "weights": needed.weights,
        "KV": needed.kv,
        "encoder cache": needed.caches,
        "process": 0 if needed.device else needed.process,
    }
    listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
    return f"it needs {(needed.device or needed.host) / GIB:.2f} GiB ({listed})"


class Unplaced(NamedTuple):
    """A replica for which no node has room now. reason: in words."""

    model: str
    role: str
    reason: str


def place(
    spec: ClusterSpec, resources: Mapping[tuple[str, str], list[Bundle]], nodes: Sequence[Mapping[str, float]]
) -> list[Unplaced]:
    """Return the replicas of the smallest numbers that have to wait for a node.

    resources: the bundles of a replica, by model and role.
    nodes: all resources of each node.
    Raises ConfigError for a replica that would not fit even into a cluster of its own.
    """
    free = [dict(node) for node in nodes]
    waiting = []
    for model in spec.models:
        for role in model.roles:
            wanted = resources[model.name, role.role]
            empty = [dict(node) for node in nodes]
            if missing := fill(wanted, empty):
                raise ConfigError(
                    f"model {model.name}, role {role.role}: a replica fits nowhere: it needs "
                    f"{_bundle_words(missing)}{_of_ranks(wanted)}, and the nodes have {_nodes_words(nodes)}; "
                    "accepted: larger nodes, or a role that needs less",
                    param="role",
                )
            for number in range(role.scale.replicas_min):
                if missing := fill(wanted, free):
                    reason = f"no node has {_bundle_words(missing)} left"
                    waiting.append(
                        Unplaced(
                            model.name, role.role, f"{reason} for replica {number + 1} of "
                            f"{role.scale.replicas_min}",
                        )
                    )  # fmt: skip
                    break
    return waiting


def fill(wanted: Sequence[Bundle], nodes: list[dict[str, float]]) -> Bundle | None:
    """Take bundles from the first nodes that have them. Return the first that fits nowhere, or None."""
    for bundle in wanted:
        for node in nodes:
            if all(node.get(name, 0) >= value for name, value in bundle.items()):
                for name, value in bundle.items():
                    node[name] -= value
                break
        else:
            return bundle
    return None


def _of_ranks(wanted: Sequence[Bundle]) -> str:
    return f" for each of {len(wanted)} ranks" if len(wanted) > 1 else ""


def _bundle_words(bundle: Mapping[str, float]) -> str:
    return ", ".join(
        f"{value / GIB:.2f} GiB of memory" if name == MEMORY else f"{value:g} {name}"
        for name, value in bundle.items()
    )


def _nodes_words(nodes: Sequence[Mapping[str, float]]) -> str:
    shown = [
        _bundle_words({name: node[name] for name in (CPU, MEMORY, GPU) if name in node}) for node in nodes
    ]
    counted = [f"{shown.count(one)} x ({one})" for one in dict.fromkeys(shown)]
    return ", ".join(counted) or "nothing"
