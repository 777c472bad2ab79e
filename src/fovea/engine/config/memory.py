"""Settings of the KV pool, of encoder outputs and of processed pixels."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.settings import check_settings, setting
from fovea.engine.keep import ALL, parse_keep

KV_DTYPES = ("auto", "int8", "fp8")
MOST_MIB = 1 << 24
"""Upper limit of every setting in MiB."""
MOST_SECONDS = 1 << 31
"""Upper limit of every setting in seconds."""


def _kv_keep(text: str) -> str:
    try:
        parse_keep(text)
    except InvalidRequest as error:
        raise ConfigError(error.message, param="kv_keep") from None
    return ""


@dataclass(frozen=True, slots=True)
class KVSettings:
    """The KV pool and the prefixes shared in it."""

    block_size: int = setting(
        16, "Tokens per KV block. Prefixes are shared in whole blocks.", low=1, high=256
    )
    kv_cache_mib: int = setting(
        0,
        "Ceiling of the KV pool in MiB. 0 is a quarter of the free memory, at most 4 GiB; on CUDA what the "
        "largest step leaves, which is measured at the start (docs/gpu.md).",
        low=0,
        high=MOST_MIB,
    )
    kv_blocks: int = setting(
        0, "The KV pool in blocks instead of MiB. 0: by kv_cache_mib. For tests.", low=0, high=1 << 30
    )
    kv_dtype: str = setting(
        "auto",
        "Type of keys and values in the pool. auto is the model's own. int8 and fp8 (e4m3) store them in "
        "half of the bytes of bf16, with a scale for each head of each token; lossy, see docs/kv.md. fp8 is "
        "for GPUs, and for the kernels torch.",
        choices=KV_DTYPES,
    )
    kv_keep: str = setting(
        ALL,
        "Default of the request field kv_keep, which keys and values are kept: all, or METHOD:AMOUNT, as "
        "snap:0.25 (a quarter of the prompt) or snap:4096 (at most 4,096 tokens, prompt and answer). "
        "Methods: snap (for most uses), images, text, window. Lossy, and not for all models: docs/kv.md.",
        check=_kv_keep,
        words="all, or METHOD:AMOUNT",
    )
    kv_host_mib: int = setting(
        0,
        "MiB of host memory for the KV of image prefixes that are evicted from the pool, so that a "
        "follow-up question loads them. For GPUs; on a CPU a larger pool uses the same memory better. "
        "0: none.",
        low=0,
        high=MOST_MIB,
    )
    state_cache_mib: int = setting(
        0,
        "Ceiling of the states of models with recurrent or convolution layers (Qwen3.5, LFM2), in MiB. There "
        "is one per running sequence, and checkpoints from which later requests with the same prefix "
        "continue. 0 is half of the memory that is free for KV.",
        low=0,
        high=MOST_MIB,
    )
    state_spacing: int = setting(
        1024,
        "Tokens between two checkpoints in a long prompt, beside those at the ends of images and of the "
        "prompt. For models with states. 0: none.",
        low=0,
        high=1 << 24,
    )
    kv_ttl_s: int = setting(
        0,
        "Prefixes older than this are not reused, in seconds. A prefix is reused only within its own window "
        "of this length, so it is often lost earlier. 0: no bound.",
        low=0,
        high=MOST_SECONDS,
    )
    max_context: int = setting(
        0,
        "Tokens of prompt and answer together. 0 is the model's own limit, capped by the pool.",
        low=0,
        high=1 << 24,
    )
    prefix_cache: bool = setting(True, "Share the KV of equal prefixes between requests.")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """Caches of encoder outputs: on the device, in host memory, on disk."""

    embed_cache_mib: int = setting(
        256,
        "Ceiling of the encoder-output cache in the device's memory, in MiB. 0 turns it off.",
        low=0,
        high=MOST_MIB,
    )
    embed_host_mib: int = setting(
        0,
        "MiB of host memory for encoder outputs that were evicted from the device; for CUDA. 0: none.",
        low=0,
        high=MOST_MIB,
    )
    embed_disk_dir: str = setting(
        "",
        "Folder for encoder outputs that outlive the process. Several processes may share it. Empty: none.",
    )
    embed_disk_mib: int = setting(4096, "Ceiling of that folder in MiB.", low=1, high=MOST_MIB)
    embed_ttl_s: int = setting(
        0,
        "Encoder outputs older than this are misses in every tier, in seconds. 0: no bound.",
        low=0,
        high=MOST_SECONDS,
    )
    region_cache_mib: int = setting(
        64,
        "Ceiling of the cache of encoded image regions (visual tokens by relevance), in MiB. 0 turns it off.",
        low=0,
        high=MOST_MIB,
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class PixelSettings:
    """Processed pixels between decoding and encoding."""

    pixel_pool_mib: int = setting(
        1024,
        "Ceiling of processed pixels in MiB. A request that needs more is prepared alone.",
        low=1,
        high=MOST_MIB,
    )
    pixel_cache_mib: int = setting(
        64,
        "Ceiling of pixels in the pool that no request needs and that are cached, in MiB. 0: none.",
        low=0,
        high=MOST_MIB,
    )
    pixel_ttl_s: int = setting(
        0,
        "Cached pixels expire this long after a request needed them, in seconds. 0: no bound.",
        low=0,
        high=MOST_SECONDS,
    )
    preprocess_workers: int = setting(2, "Threads that resize and normalise images.", low=1, high=64)
    frame_workers: int = setting(2, "Threads that resize and normalise frames of videos.", low=1, high=64)

    def __post_init__(self) -> None:
        check_settings(self)
