"""How many KV blocks fit: every pool has a ceiling before the first request."""

from __future__ import annotations

import torch

from fovea.core.errors import ConfigError
from fovea.core.hardware import available_memory
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.models.base import VisionLanguageModel

CPU_SHARE, CPU_CEILING = 0.25, 4096 * MIB
CUDA_SHARE = 0.8


def pool_blocks(config: EngineConfig, model: VisionLanguageModel) -> int:
    """Blocks of the KV pool. Raises ConfigError when not even one fits."""
    if config.kv_blocks:
        return config.kv_blocks
    decoder = model.decoder.config
    block = decoder.kv_bytes_per_token(model.dtype.itemsize) * config.block_size
    budget = config.kv_cache_mib * MIB or _automatic(model.device)
    blocks = budget // block
    if blocks < 1:
        raise ConfigError(
            f"kv_cache_mib: {budget // MIB} MiB hold no block of {block} bytes", param="kv_cache_mib"
        )
    useful = config.max_running * -(-decoder.max_positions // config.block_size)
    return min(blocks, useful)


def host_slots(config: EngineConfig, model: VisionLanguageModel) -> int:
    """Blocks of host memory for image prefixes that the pool gives up."""
    if not config.prefix_cache:
        return 0
    block = model.decoder.config.kv_bytes_per_token(model.dtype.itemsize) * config.block_size
    return config.kv_host_mib * MIB // block


def _automatic(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_SHARE)
    return min(int(available_memory() * CPU_SHARE), CPU_CEILING)
