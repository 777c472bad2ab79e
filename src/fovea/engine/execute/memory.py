"""Sizes of the KV pool, of states, of host memory and of padded decodes, fixed before the first request."""

from __future__ import annotations

import torch

from fovea.core.errors import ConfigError
from fovea.core.hardware import available_memory
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.schedule.padding import Padding, padded_sizes

CPU_SHARE, CPU_CEILING = 0.25, 4096 * MIB
CUDA_SHARE = 0.8
STATE_SHARE = 0.5
"""Share of the memory for KV that states get if their ceiling is not configured, in models that have any."""
CHECKPOINTS = 8
"""Most checkpoints per running sequence for which slots are made if their ceiling is not configured."""


def pool_blocks(config: EngineConfig, model: VisionLanguageModel) -> int:
    """Return the number of blocks of the KV pool. Raises ConfigError when not even one fits."""
    if config.kv.kv_blocks:
        return config.kv.kv_blocks
    decoder = model.decoder.config
    block = decoder.kv_bytes_per_token(model.dtype.itemsize) * config.kv.block_size
    budget = config.kv.kv_cache_mib * MIB or _automatic(model.device)
    if decoder.stateful and not config.kv.kv_cache_mib:
        budget = int(budget * (1 - STATE_SHARE))
    blocks = budget // block
    if blocks < 1:
        size = f"{budget // MIB} MiB"
        source = f"kv_cache_mib: {size}" if config.kv.kv_cache_mib else f"free memory allows {size}, which"
        raise ConfigError(f"{source} hold no block of {block} bytes", param="kv_cache_mib")
    useful = config.schedule.max_running * -(-decoder.max_positions // config.kv.block_size)
    return min(blocks, useful)


def state_slots(config: EngineConfig, model: VisionLanguageModel) -> int:
    """Return the number of slots for states; 0: no layer of the model has any.

    Raises ConfigError if there is no room for two: a sequence's own, and a checkpoint that it continues.
    """
    decoder = model.decoder.config
    if not decoder.stateful:
        return 0
    slot = decoder.state_bytes(model.dtype.itemsize)
    budget = config.kv.state_cache_mib * MIB or int(_automatic(model.device) * STATE_SHARE)
    slots = budget // slot
    if slots < 2:
        source = "state_cache_mib" if config.kv.state_cache_mib else "half of the memory for KV"
        raise ConfigError(
            f"{source}: {budget // MIB} MiB hold {slots} states of {slot} bytes; at least 2 are needed",
            param="state_cache_mib",
        )
    return min(slots, config.schedule.max_running * (1 + CHECKPOINTS))


def host_slots(config: EngineConfig, model: VisionLanguageModel) -> int:
    """Return the number of host memory blocks for image prefixes that the pool evicts.

    Raises ConfigError when not even one fits, or when prefixes are not cached.
    """
    if not config.kv.kv_host_mib:
        return 0
    if not config.kv.prefix_cache:
        raise ConfigError(
            "kv_host_mib keeps prefixes that requests share, and prefix_cache is off", param="kv_host_mib"
        )
    block = model.decoder.config.kv_bytes_per_token(model.dtype.itemsize) * config.kv.block_size
    slots = config.kv.kv_host_mib * MIB // block
    if slots < 1:
        raise ConfigError(
            f"kv_host_mib: {config.kv.kv_host_mib} MiB hold no block of {block} bytes", param="kv_host_mib"
        )
    return slots


def decode_padding(
    config: EngineConfig, model: VisionLanguageModel, blocks: int, max_context: int
) -> Padding | None:
    """Return the padding of decodes; None: they are not padded.

    blocks: blocks of the KV pool; the block after them takes the KV of padding rows.
    Raises ConfigError when padding is configured and the kernels do not allow it.
    """
    mode, decoder = config.model.decode_graphs, model.decoder.config
    heads = decoder.attention_heads
    in_place = model.kernels.attends_in_place(heads.dim)
    if decoder.stateful or len(decoder.kv_groups) > 1:
        if mode == "padded":
            raise ConfigError(
                "decode_graphs is 'padded'; models with states or sliding windows accept auto and off",
                param="decode_graphs",
            )
        return None
    if mode == "off" or (mode == "auto" and not (in_place and model.device.type == "cuda")):
        return None
    if not in_place:
        raise ConfigError(
            "decode_graphs is 'padded', and these kernels group decodes by length; "
            "accepted with triton, flashinfer and native kernels",
            param="decode_graphs",
        )
    return Padding(
        sizes=padded_sizes(config.schedule.max_running),
        width=-(-max_context // config.kv.block_size),
        axes=0 if model.merge is None else 3,
        shared_rows=model.kernels.shared_rows(heads.query // heads.kv),
        least_rows=model.kernels.least_shared_rows,
        block_size=config.kv.block_size,
        scrap=blocks,
        launch_only=mode == "padded",
    )


def _automatic(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_SHARE)
    return min(int(available_memory() * CPU_SHARE), CPU_CEILING)
