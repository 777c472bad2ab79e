"""A recommendation as files: the settings of `fovea serve`, and the spec of `fovea deploy`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fovea.core.errors import ConfigError
from fovea.core.precision import check_precision
from fovea.planner.memory import state_bytes
from fovea.planner.parallel import Split, divisions
from fovea.planner.precision import RECIPES
from fovea.planner.recommend import Choice
from fovea.planner.roofline import Setup
from fovea.planner.targets import MARGIN, alert_targets
from fovea.planner.workload import Workload

ENCODER = "encoder"
"""Beginning of the invented host names of servers that encode."""
MIB = 1 << 20
GIB = 1 << 30


def engine_settings(choice: Choice, workload: Workload) -> dict[str, Any]:
    """Return settings of `fovea serve` by name.

    Raises ConfigError if the precision is none of the setting `quantization`, if the engine refuses it on the
    device, or if no engine of Fovea can be divided among that many devices.
    """
    option = choice.option
    setup, memory = option.setup, option.capacity
    weights = replace(setup.precision, kv="", dtype="bfloat16", storage="plain")
    quantization = next((name for name, known in RECIPES.items() if known == weights), None)
    if quantization is None:
        raise ConfigError(
            f"the plan has the precision {choice.precision!r}, and `fovea serve` has no setting for it; "
            f"accepted: {', '.join(RECIPES)}, and kv=int8 or kv=fp8 beside them",
            param="precision",
        )
    states = option.max_running * state_bytes(setup.shape, setup.precision)
    context = max(one.tokens.last for one in option.kinds)
    precision = setup.precision
    check_precision(quantization, precision.dtype, precision.kv or "auto", setup.hardware.device)
    settings: dict[str, Any] = {
        "model": setup.shape.name,
        "device": "cuda" if setup.hardware.kind == "gpu" else "cpu",
        "dtype": setup.precision.dtype,
        "quantization": quantization,
        "kv_cache_mib": max(1, (memory.kv - states) // MIB),
        "embed_cache_mib": max(1, memory.encoder_cache // MIB),
        "max_running": option.max_running,
        "max_context": min(setup.shape.max_positions, 1 << math.ceil(math.log2(2 * context))),
        "policy": "dual",
    }
    if setup.devices > 1:
        settings |= ranks(setup)
    if setup.precision.kv in ("int8", "fp8"):
        settings["kv_dtype"] = setup.precision.kv
    if states:
        settings["state_cache_mib"] = max(1, math.ceil(states / MIB))
    if workload.itl_ms:
        settings["target_itl_ms"] = max(1, round(workload.itl_ms))
    if workload.ttft_ms:
        settings["target_ttft_ms"] = max(1, round(workload.ttft_ms))
    if workload.itl_ms or workload.ttft_ms:
        settings["target_percentile"] = workload.percentile
    return settings


def ranks(setup: Setup) -> dict[str, int]:
    """Return the settings that divide a model among its devices. Raises ConfigError if nothing does."""
    possible = divisions(setup, 0)
    if not possible:
        raise ConfigError(
            f"{setup.shape.name} cannot be divided among {setup.devices} devices: its heads and layers do "
            "not allow it; accepted: another number in --devices",
            param="devices",
        )
    best = possible[0]
    return {"tensor_parallel": best.tensor, "pipeline_parallel": best.pipeline}


def engine_toml(choice: Choice, workload: Workload, split: Split | None = None) -> str:
    """Return a configuration file of `fovea serve --config`. Raises the errors of `engine_settings`.

    split: is recommended: the engine asks others for encoded images.
    """
    lines = [f"# {choice.title}", *(f"# {reason}" for reason in choice.reasons)]
    settings = engine_settings(choice, workload)
    if split is not None:
        peers = [f"http://{ENCODER}-{number}:8000" for number in range(split.encoders)]
        settings |= {"role": "prefill-decode", "encode_peers": ",".join(peers)}
        lines.append(
            f"# {split.decoders} servers have this file, and {split.encoders} have encode.toml. Put the "
            "addresses of the latter into encode_peers, and set FOVEA_PEER_KEY to one secret for all of them."
        )
    lines += [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


def encode_toml(choice: Choice, workload: Workload) -> str:
    """Return a configuration file of a server that only encodes images for others.

    Raises the errors of `engine_settings`.
    """
    settings = engine_settings(choice, workload)
    lines = ["# A server that encodes images for those that have engine.toml. Set FOVEA_PEER_KEY as there."]
    names = ("model", "device", "dtype", "quantization", "kv_dtype", "embed_cache_mib")
    lines += [f"{name} = {json.dumps(settings[name])}" for name in names if name in settings]
    return "\n".join([*lines, 'role = "encode"']) + "\n"


def deploy_toml(
    choice: Choice, workload: Workload, gpus: Mapping[str, str], split: Split | None = None
) -> str:
    """Return a spec of `fovea deploy`. It has no roles: all its replicas do everything.

    split: is recommended: the file says that it is not in it.
    gpus: names of GPUs in such specs, by names of devices.
    Raises the errors of `engine_settings`.
    """
    settings = engine_settings(choice, workload)
    setup, option = choice.option.setup, choice.option
    pool: dict[str, Any] = {
        "name": "vlm",
        "model": settings.pop("model"),
        "hardware": settings.pop("device"),
        "replicas": option.replicas,
        "memory_gib": math.ceil(1.25 * (option.capacity.weight_bytes + GIB) / GIB)
        if setup.hardware.kind == "gpu"
        else math.ceil(option.capacity.total / GIB),
        "disk_gib": math.ceil(1.5 * option.capacity.weight_bytes / GIB) + 10,
    }
    if setup.hardware.kind == "gpu" and setup.hardware.name in gpus:
        pool["gpu"] = gpus[setup.hardware.name]
    inline = ", ".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    lines = [f"# {choice.title}"]
    if split is not None:
        lines.append("# All replicas do everything here: fovea deploy knows no roles. See encode.toml.")
    lines += ['name = "vlm"', 'host = "localhost"', "", "[[pool]]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in pool.items()]
    lines += [f"settings = {{ {inline} }}", "", "[gateway]", "", "[monitoring]"]
    targets = alert_targets(option, workload)
    if targets:
        lines += [
            "",
            "[monitoring.targets]",
            f"# Your targets, or {MARGIN:g} times the prediction for your rate, up to a bound of buckets.",
            *(f"{name} = {seconds:g}" for name, seconds in targets.items()),
        ]
    return "\n".join(lines) + "\n"
