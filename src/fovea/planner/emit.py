"""A recommendation as files: the settings of `fovea serve`, and the spec of `fovea deploy`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fovea.core.errors import ConfigError
from fovea.planner.memory import state_bytes
from fovea.planner.precision import RECIPES
from fovea.planner.recommend import Choice
from fovea.planner.workload import Workload

MIB = 1 << 20
GIB = 1 << 30


def engine_settings(choice: Choice, workload: Workload) -> dict[str, Any]:
    """Return settings of `fovea serve` by name.

    Raises ConfigError if a replica has several devices, because an engine of Fovea runs on one, or if the
    precision is none of the setting `quantization`.
    """
    option = choice.option
    setup, memory = option.setup, option.capacity
    if setup.devices > 1:
        raise ConfigError(
            f"the plan divides {setup.shape.name} among {setup.devices} devices, and an engine of Fovea runs "
            "on one; accepted: --devices 1, or another engine behind `fovea gateway` (see the advice)",
            param="devices",
        )
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
    settings: dict[str, Any] = {
        "model": setup.shape.name,
        "device": "cuda" if setup.hardware.kind == "gpu" else "cpu",
        "quantization": quantization,
        "kv_cache_mib": max(1, (memory.kv - states) // MIB),
        "embed_cache_mib": max(1, memory.encoder_cache // MIB),
        "max_running": option.max_running,
        "max_context": min(setup.shape.max_positions, 1 << math.ceil(math.log2(2 * context))),
        "policy": "dual",
    }
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


def engine_toml(choice: Choice, workload: Workload) -> str:
    """Return a configuration file of `fovea serve --config`. Raises the errors of `engine_settings`."""
    lines = [f"# {choice.title}", *(f"# {reason}" for reason in choice.reasons)]
    lines += [f"{name} = {json.dumps(value)}" for name, value in engine_settings(choice, workload).items()]
    return "\n".join(lines) + "\n"


def deploy_toml(choice: Choice, workload: Workload, gpus: Mapping[str, str]) -> str:
    """Return a spec of `fovea deploy`.

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
    lines = [f"# {choice.title}", 'name = "vlm"', 'host = "localhost"', "", "[[pool]]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in pool.items()]
    lines += [f"settings = {{ {inline} }}", "", "[gateway]", "", "[monitoring]"]
    return "\n".join(lines) + "\n"
