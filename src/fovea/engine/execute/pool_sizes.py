"""Sizes of the KV pool, of states, of host memory and of padded decodes, fixed before the first request."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from fovea.core.errors import ConfigError
from fovea.core.hardware import available_memory
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.execute.attention_plan import most_shared_rows
from fovea.engine.layers.config import DecoderConfig, KVGroup
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.schedule.decode_batches import GroupPadding, Padding, padded_sizes, window_width
from fovea.kernels.pages import KVFormat, kv_format

log = logging.getLogger("fovea.engine")

LEAST_ROWS = 8
"""Fewest rows of a padded step on CUDA: an answer has the same bits with and without drafts beside it."""
CPU_SHARE, CPU_CEILING = 0.25, 4096 * MIB
CUDA_SHARE = 0.8
BALANCED_WINDOWS = 4
"""Layers with and without a sliding window run out of blocks together if sequences are so many windows long.

Shorter sequences leave blocks without a window unused, longer ones blocks with one.
"""
STATE_SHARE = 0.5
"""Share of the memory for KV that states get if their ceiling is not configured, in models that have any."""
CHECKPOINTS = 8
"""Most checkpoints per running sequence for which slots are made, also if a ceiling is configured."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Numbers of KV blocks.

    blocks: of the layers that see all tokens.
    window: of the layers with a sliding window; 0: the model has none.
    """

    blocks: int
    window: int = 0


def pool_sizes(
    config: EngineConfig, model: VisionLanguageModel, room: int | None = None, beside: int = 0
) -> PoolSizes:
    """Return the sizes of the KV pools.

    room: bytes for KV and states; None: a share of the free memory.
    beside: bytes for each token that others need, for drafts.
    Raises ConfigError when not even one block or one window fits.
    """
    decoder, size = model.ranks.largest_share(model), config.kv.block_size
    group = decoder.window
    needed = 0 if group is None else _window_blocks(config, decoder, group)
    if config.kv.kv_blocks:
        if config.peers.role != "encode":  # which computes no prompts
            _check_window("kv_blocks", config.kv.kv_blocks, needed)
        return PoolSizes(config.kv.kv_blocks, config.kv.kv_blocks if needed else 0)
    kind = model.dtype.itemsize, pool_format(config, model)
    windowed = 0 if group is None else group.bytes_per_token(*kind) * size
    block = (decoder.kv_bytes_per_token(*kind) + beside) * size - windowed
    states = state_slots(config, model, room) * decoder.state_bytes(model.dtype.itemsize)
    budget = config.kv.kv_cache_mib * MIB or max(0, _room(model, room) - states)
    # Window blocks per block without a window. Short sequences need as many of both kinds, longer ones fewer
    # window blocks.
    ratio = 0.0 if group is None else (group.window or 0) / (BALANCED_WINDOWS * (group.window or 1))
    blocks = int(budget / (block + ratio * windowed))
    if blocks < 1:
        size_text = f"{budget // MIB} MiB"
        source = f"kv_cache_mib: {size_text}"
        if not config.kv.kv_cache_mib:
            source = f"free memory allows {size_text}, which"
        raise ConfigError(f"{source} hold no block of {block} bytes", param="kv_cache_mib")
    useful = config.schedule.max_running * -(-decoder.max_positions // size)
    if group is None:
        return PoolSizes(min(blocks, useful))
    most = min((budget - min(blocks, useful) * block) // windowed, config.schedule.max_running * needed)
    _check_window("kv_cache_mib", most, needed)
    return PoolSizes(min(blocks, useful), most)


def block_bytes(config: EngineConfig, model: VisionLanguageModel) -> int:
    """Return the bytes of a block of all layers."""
    token = model.ranks.largest_share(model).kv_bytes_per_token(
        model.dtype.itemsize, pool_format(config, model)
    )
    return token * config.kv.block_size


def pool_bytes(
    config: EngineConfig, model: VisionLanguageModel, sizes: PoolSizes, states: int, beside: int = 0
) -> int:
    """Return the bytes of the KV pools and of so many slots for states. beside: as in `pool_sizes`."""
    decoder, kind = model.ranks.largest_share(model), (model.dtype.itemsize, pool_format(config, model))
    windowed = 0 if decoder.window is None else decoder.window.bytes_per_token(*kind)
    whole = decoder.kv_bytes_per_token(*kind) - windowed + beside
    tokens = sizes.blocks * whole + sizes.window * windowed
    return tokens * config.kv.block_size + states * decoder.state_bytes(model.dtype.itemsize)


def pool_format(config: EngineConfig, model: VisionLanguageModel) -> KVFormat | None:
    """Return the format of the pool's keys and values; None: they have the model's type.

    Raises ConfigError if the model's kernels do not have it.
    """
    if config.kv.kv_dtype == "auto":
        return None
    return kv_format(config.kv.kv_dtype, type(model.kernels).__name__, model.kernels.kv_formats)


def most_new_tokens(config: EngineConfig, decoder: DecoderConfig) -> int:
    """The most tokens of one sequence that a step computes."""
    return config.schedule.max_step_tokens + decoder.whole_images


def _window_blocks(config: EngineConfig, decoder: DecoderConfig, group: KVGroup) -> int:
    """Blocks of the window pool that one sequence can come to use."""
    tokens = (group.window or 0) + most_new_tokens(config, decoder)
    return -(-min(tokens, decoder.max_positions) // config.kv.block_size) + 1


def _check_window(setting: str, blocks: int, needed: int) -> None:
    if blocks < needed:
        raise ConfigError(
            f"{setting} allows {blocks} blocks for layers with a sliding window; at least {needed} are "
            "needed: a window, and the tokens of one step (max_step_tokens)",
            param=setting,
        )


def state_slots(config: EngineConfig, model: VisionLanguageModel, room: int | None = None) -> int:
    """Return the number of slots for states; 0: no layer of the model has any.

    room: bytes for KV and states; None: a share of the free memory.
    Raises ConfigError if there is no room for two: a sequence's own, and a checkpoint.
    """
    decoder = model.ranks.largest_share(model)
    if not decoder.stateful:
        return 0
    slot = decoder.state_bytes(model.dtype.itemsize)
    useful = config.schedule.max_running * (1 + CHECKPOINTS)
    total = _room(model, room)
    if config.kv.state_cache_mib:
        slots = min(config.kv.state_cache_mib * MIB // slot, useful)
        source = f"state_cache_mib: {config.kv.state_cache_mib} MiB"
    else:
        # A configured KV pool is not divided; states get a part of what it leaves.
        left = max(0, total - config.kv.kv_cache_mib * MIB)
        slots = max(int(left * STATE_SHARE) // slot, min(2, total // slot))
        slots, source = min(slots, useful), f"free memory allows {total // MIB} MiB, which"
    if slots < 2:
        raise ConfigError(
            f"{source} hold {slots} states of {slot} bytes; at least 2 are needed", param="state_cache_mib"
        )
    return slots


def host_slots(config: EngineConfig, model: VisionLanguageModel, beside: int = 0) -> int:
    """Return the number of host memory blocks for image prefixes that the pool evicts.

    beside: bytes for each token that lie beside the model's, for drafts.
    Raises ConfigError when not even one fits, or when prefixes are not cached.
    """
    if not config.kv.kv_host_mib:
        return 0
    if not config.kv.prefix_cache:
        raise ConfigError(
            "kv_host_mib keeps prefixes that requests share, and prefix_cache is off", param="kv_host_mib"
        )
    if model.decoder.config.window is not None:
        raise ConfigError(
            "kv_host_mib is for models without sliding windows; accepted here: 0", param="kv_host_mib"
        )
    block = block_bytes(config, model) + beside * config.kv.block_size
    slots = config.kv.kv_host_mib * MIB // block
    if slots < 1:
        raise ConfigError(
            f"kv_host_mib: {config.kv.kv_host_mib} MiB hold no block of {block} bytes", param="kv_host_mib"
        )
    return slots


def _attends_in_place(model: VisionLanguageModel) -> bool:
    return all(
        model.kernels.attends_in_place(group.heads.dim, window=group.window is not None)
        for group in model.decoder.config.kv_groups
    )


def graph_obstacle(model: VisionLanguageModel) -> str | None:
    """Return why the model's decode steps cannot be recorded as CUDA graphs; None: they can."""
    if model.ranks.size > 1:
        return "several processes compute the model together"
    if model.decoder.config.cross_layers:
        return "the model has cross-attention"
    if not _attends_in_place(model):
        return "these kernels group decodes by length"
    return model.decoder.wait


def decode_padding(config: EngineConfig, model: VisionLanguageModel, max_context: int) -> Padding | None:
    """Return the padding of decodes, for a pool without blocks (`Padding.fit`); None: they are not padded.

    Raises ConfigError when padding is configured and the kernels do not allow it.
    """
    mode, decoder = config.model.decode_graphs, model.decoder.config
    if mode == "off" or (mode == "auto" and model.device.type != "cuda"):
        return None
    if mode == "padded":
        if decoder.cross_layers:
            raise ConfigError(
                "decode_graphs is 'padded'; models with cross-attention accept auto and off",
                param="decode_graphs",
            )
        if not _attends_in_place(model):
            raise ConfigError(
                "decode_graphs is 'padded', and these kernels group decodes by length; "
                "accepted with triton, flashinfer and native kernels",
                param="decode_graphs",
            )
        if model.device.type == "cuda" and (wait := model.decoder.wait):
            raise ConfigError(
                f"decode_graphs is 'padded', but {wait}; accepted for this model: auto and off",
                param="decode_graphs",
            )
    elif obstacle := graph_obstacle(model):
        log.info("decode steps are not recorded as CUDA graphs: %s", obstacle)
        return None
    size = config.kv.block_size
    width = -(-max_context // size)
    groups = [
        GroupPadding(
            width if group.window is None else min(width, window_width(group.window, size)),
            0,
            group.window is not None,
            model.kernels.cutting(group.heads),
        )
        for group in decoder.kv_groups
    ]
    return Padding(
        sizes=padded_sizes(config.schedule.max_running, LEAST_ROWS if model.device.type == "cuda" else 1),
        axes=0 if model.merge is None else 3,
        groups=tuple(groups),
        shared_rows=most_shared_rows(model.kernels, decoder.kv_groups[0]),
        least_rows=model.kernels.least_shared_rows,
        sequences=model.kernels.sharing_rounds,
        block_size=size,
        launch_only=mode == "padded",
        scrap_state=0 if decoder.stateful else None,
    )


def _room(model: VisionLanguageModel, measured: int | None) -> int:
    return _automatic(model.device) if measured is None else max(0, measured)


def _automatic(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_SHARE)
    return min(int(available_memory() * CPU_SHARE), CPU_CEILING)
