"""Every setting of the engine: type, default, range, meaning. Frozen once made."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.errors import ConfigError, InvalidRequest
from fovea.engine.compile_modes import CompileModes
from fovea.engine.visual_budget.methods import PARAM, method, policy

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
POLICY_NAMES = ("dual", "fcfs", "priority", "detail")
DETAIL_POLICY_NAMES = ("full", "keywords")
WHEN_FULL = ("wait", "refuse")
QUANTIZATIONS = ("none", "int8", "int4", "fp8")
KERNELS = ("auto", "native", "onednn", "torch", "triton", "flashinfer")
DECODE_GRAPHS = ("auto", "off", "padded")
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """dtype: "auto" is the checkpoint's own on CUDA and on CPUs with bf16 units, float32 elsewhere.
    quantization: "none" keeps the weights as they are; "int8" and "int4" round them while they are read, to half and less
        than a third of their bytes. Lossy: docs/quantization.md has the figures. Fast on CPUs with bf16 units. "fp8": 8-bit
        floats, for CUDA from Hopper on.
    device: "auto" is CUDA where torch sees it, else CPU.
    threads: CPU threads of torch; 0 leaves torch's own choice.
    block_size: tokens per KV block; prefixes are shared in whole blocks. [1, 256].
    kv_cache_mib: ceiling of the KV pool; 0 is a quarter of the free memory, at most 4 GiB (CUDA: 80% of it).
    kv_blocks: the pool in blocks instead of MiB; 0: by kv_cache_mib. Small pools are for tests.
    kv_host_mib: host memory for the KV of image prefixes that the pool gives up, so that a follow-up question loads it. For
        GPUs; on a CPU a larger pool is the same memory, used better. 0: none. [0, 2**24].
    kv_ttl_s: a prefix is found for at most so many seconds after it was computed, often for less: prefixes belong to
        generations of that length, and a new one finds nothing of the last. 0: no bound. [0, 2**31].
    max_context: tokens of prompt and answer together; 0 is the model's own limit, capped by the pool.
    max_running: sequences that share a step. [1, 4096].
    max_step_tokens: tokens computed per step, decodes first, prefill chunks in what is left. [1, 2**20].
    max_step_visual_tokens: visual tokens of the images that a step works on; one image always passes. [1, 2**20].
    policy: who joins first when there is room: "dual" (text, follow-ups and known images do not wait behind new
        images), "fcfs", "priority" (of the request, then dual), "detail" (requests of like visual cost together).
    max_passes: how many later requests may join before one that waits. [0, 2**20].
    pace: longest step, in multiples of one that only decodes, while prompts or images are computed beside; 0: no bound.
    target_itl_ms: the same in milliseconds, whichever is shorter; 0: none.
    max_queue: requests that may wait; more are refused with 429. 0: no bound.
    when_full: a request whose KV or pixels find no room beside those in flight: "wait", or "refuse" with 429.
    detail_policy: what `detail: auto` is: "full" (the model's own resolution), "keywords" (as the question's words tell).
    degrade_from: load, in parts of what there is room for, from which `auto` loses a level, and half way from there to 1
        another. 0: never, up to 1.
    degrade_by: what gives way then: "detail", the level, or the tokens that a method of `visual_tokens` leaves out.
    visual_tokens: how many visual tokens an image keeps whose request does not say: "off", all; METHOD:SHARE
        ("relevance:0.5"); or a preset: "document" (all), "general", "fast".
    region_cache_mib: ceiling of encoded regions of images that are seen in parts. 0 turns it off.
    embed_cache_mib: ceiling of the encoder-output cache in the device's memory. 0 turns it off.
    embed_host_mib: ceiling of encoder outputs in host memory that the device had no room for; for CUDA. 0: none.
    embed_disk_dir: folder for encoder outputs that outlive the process; may be shared by several. Empty: none.
    embed_disk_mib: ceiling of that folder. [1, 2**24].
    embed_ttl_s: encoder outputs older than so many seconds are misses, in every tier; 0: no bound.
    pixel_pool_mib: ceiling of processed pixels; a request that needs more passes alone.
    pixel_cache_mib: at most so much of it keeps pixels that nobody needs, until somebody needs the room. 0: nothing.
    pixel_ttl_s: such pixels are gone so many seconds after they were needed; 0: no bound.
    prefix_cache: share the KV of equal prefixes between requests.
    preprocess_workers: threads that resize and normalise images. [1, 64].
    kernels: on a CPU: "native" is Fovea's own C++ (bf16; weights packed without loss to 12 bits), "onednn" torch with
        weights in oneDNN's layout, "torch" plain torch; "auto" the first of them that the machine and the type allow. On
        CUDA: "flashinfer" (Triton's, with FlashInfer's attention for prompts), "triton" and "torch"; "auto" is the first of
        them that is installed and takes the model (docs/gpu.md).
    decode_graphs: "auto" pads steps that only decode to a few batch sizes and replays them as CUDA graphs, with Triton's
        kernels; "padded" pads the same and launches every kernel, to compare; "off" does neither.
    compile: what torch compiles before its first use, for the kernels "torch": "off", "default", "reduce-overhead" or
        "max-autotune" for all, or by component: encoder=MODE,projector=MODE,decoder=MODE. See docs/engines.md.
    encoder_engines: encoders made by `fovea build`, for the images whose grid they were built for: "off", "auto" (the folder
        beside the checkpoint) or a folder. They are machine code: whoever names a folder runs what is in it.
    """

    dtype: str = "auto"
    quantization: str = "none"
    device: str = "auto"
    threads: int = 0
    block_size: int = 16
    kv_cache_mib: int = 0
    kv_blocks: int = 0
    kv_host_mib: int = 0
    kv_ttl_s: int = 0
    max_context: int = 0
    max_running: int = 64
    max_step_tokens: int = 2048
    max_step_visual_tokens: int = 4096
    policy: str = "dual"
    max_passes: int = 32
    pace: float = 2.5
    target_itl_ms: int = 0
    max_queue: int = 256
    when_full: str = "wait"
    detail_policy: str = "full"
    degrade_from: float = 0.0
    degrade_by: str = "detail"
    visual_tokens: str = "off"
    region_cache_mib: int = 64
    embed_cache_mib: int = 256
    embed_host_mib: int = 0
    embed_disk_dir: str = ""
    embed_disk_mib: int = 4096
    embed_ttl_s: int = 0
    pixel_pool_mib: int = 1024
    pixel_cache_mib: int = 64
    pixel_ttl_s: int = 0
    prefix_cache: bool = True
    preprocess_workers: int = 2
    kernels: str = "auto"
    decode_graphs: str = "auto"
    compile: str = "off"
    encoder_engines: str = "off"

    @property
    def room(self) -> int:
        """Answers that run and wait; 0: no bound."""
        return self.max_running + self.max_queue if self.max_queue else 0

    def __post_init__(self) -> None:
        if self.device not in DEVICES and not self.device.startswith("cuda:"):
            raise ConfigError(
                f"device is {self.device!r}; accepted: {', '.join(DEVICES)}, cuda:N", param="device"
            )
        for name, accepted in (
            ("dtype", DTYPES),
            ("quantization", QUANTIZATIONS),
            ("kernels", KERNELS),
            ("decode_graphs", DECODE_GRAPHS),
            ("policy", POLICY_NAMES),
            ("when_full", WHEN_FULL),
            ("detail_policy", DETAIL_POLICY_NAMES),
        ):
            if getattr(self, name) not in accepted:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; accepted: {', '.join(accepted)}", param=name
                )
        if not isinstance(self.degrade_from, int | float) or not 0 <= self.degrade_from <= 1:
            raise ConfigError(
                f"degrade_from is {self.degrade_from!r}; accepted: 0 to 1", param="degrade_from"
            )
        if not isinstance(self.pace, int | float) or not (self.pace == 0 or 1 <= self.pace <= 1000):
            raise ConfigError(f"pace is {self.pace!r}; accepted: 0, or 1 to 1000", param="pace")
        CompileModes.of(self.compile)
        _check_reduction(self)
        if not isinstance(self.encoder_engines, str) or not self.encoder_engines:
            raise ConfigError(
                f"encoder_engines is {self.encoder_engines!r}; accepted: off, auto, or a folder",
                param="encoder_engines",
            )
        for name, low, high in (
            ("threads", 0, 1024),
            ("block_size", 1, 256),
            ("kv_cache_mib", 0, 1 << 24),
            ("kv_blocks", 0, 1 << 30),
            ("kv_host_mib", 0, 1 << 24),
            ("kv_ttl_s", 0, 1 << 31),
            ("max_context", 0, 1 << 24),
            ("max_running", 1, 4096),
            ("max_step_tokens", 1, 1 << 20),
            ("max_step_visual_tokens", 1, 1 << 20),
            ("max_passes", 0, 1 << 20),
            ("target_itl_ms", 0, 1 << 20),
            ("max_queue", 0, 1 << 20),
            ("embed_cache_mib", 0, 1 << 24),
            ("region_cache_mib", 0, 1 << 24),
            ("embed_host_mib", 0, 1 << 24),
            ("embed_disk_mib", 1, 1 << 24),
            ("embed_ttl_s", 0, 1 << 31),
            ("pixel_pool_mib", 1, 1 << 24),
            ("pixel_cache_mib", 0, 1 << 24),
            ("pixel_ttl_s", 0, 1 << 31),
            ("preprocess_workers", 1, 64),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}; accepted: {low} to {high}", param=name)


def _check_reduction(config: EngineConfig) -> None:
    name = "visual_tokens"
    if not isinstance(config.visual_tokens, str):
        raise ConfigError(
            f"{name} is {config.visual_tokens!r}; accepted: off, METHOD:SHARE, or a preset", param=name
        )
    try:
        policy(config.visual_tokens)
        name = "degrade_by"
        if config.degrade_by != "detail":
            method(config.degrade_by)
    except InvalidRequest as error:
        raise ConfigError(f"{name}: {error.message.removeprefix(f'{PARAM}: ')}", param=name) from None
