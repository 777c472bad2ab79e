"""The place of this process among those that a launcher has started, from environment variables.

torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The LeaderWorkerSet of Kubernetes sets
LWS_LEADER_ADDRESS, LWS_GROUP_SIZE and LWS_WORKER_INDEX.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from fovea.core.errors import ConfigError
from fovea.core.hardware import usable_cores
from fovea.engine.config import EngineConfig

LWS_PORT = "29500"
"""Port at which the processes of a LeaderWorkerSet meet, unless MASTER_PORT names another."""
GPUS = "CUDA_VISIBLE_DEVICES"
ANSWERS = ("1", "true")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a process that a launcher has started.

    rank, size: its number, and the number of all processes.
    local_rank: its number among those of this machine.
    host, port: where they meet.
    hosts_store: whether this process keeps the store at which they meet. torchrun keeps its own.
    run: tells one start of the processes from a later one.
    """

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    hosts_store: bool
    run: str = "0"


def place_of(config: EngineConfig, environment: Mapping[str, str]) -> Place | None:
    """Return the place of this process; None: no launcher has started it, or the model needs one process.

    Raises ConfigError if there are not as many processes as the settings say.
    """
    parallel = config.parallel
    if parallel.size == 1:
        return None
    if "LWS_LEADER_ADDRESS" in environment:
        names = "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"
        port = environment.get("MASTER_PORT", LWS_PORT)
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        names, port = ("RANK", "WORLD_SIZE", "MASTER_ADDR"), environment["MASTER_PORT"]
    else:
        return None
    values = [environment.get(name, "") for name in names]
    for name, value in (*zip(names[:2], values, strict=False), ("MASTER_PORT", port)):
        if not value.isdecimal():
            raise ConfigError(f"{name} is {value!r}; accepted: a whole number", param="tensor_parallel")
    rank, size = map(int, values[:2])
    if size != parallel.size:
        raise ConfigError(
            f"{names[1]} is {size}, and tensor_parallel {parallel.tensor_parallel} times pipeline_parallel "
            f"{parallel.pipeline_parallel} is {parallel.size}; accepted: as many processes",
            param="tensor_parallel",
        )
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ANSWERS
    return Place(
        rank,
        size,
        int(environment.get("LOCAL_RANK", "0")),
        values[2],
        int(port),
        rank == 0 and not agent,
        environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def own_gpu(environment: Mapping[str, str], local_rank: int) -> str:
    """Return which of the visible GPUs a process has, as a value of CUDA_VISIBLE_DEVICES; "": none."""
    listed = environment.get(GPUS)
    if listed is None:
        return str(local_rank)
    names = [name.strip() for name in listed.split(",") if name.strip()]
    return names[local_rank] if local_rank < len(names) else ""


def divided(config: EngineConfig) -> EngineConfig:
    """Return the settings of each process. The cores of this machine are divided among its processes."""
    size = config.parallel.size
    if size == 1 or config.model.threads or place_of(config, os.environ) is not None:
        return config
    return config.changed(threads=max(1, len(usable_cores()) // size))
