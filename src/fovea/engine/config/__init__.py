"""All settings of the engine, by subject; they are frozen after construction. It must not import torch.

Each setting is declared once, in the class of its subject, with type, default, range and help
(`core.settings`). Python code reads `config.kv.block_size`; flags, environment variables, TOML files and
`EngineConfig.of` use the flat name `block_size`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict, Unpack

from fovea.core.precision import Device, check_precision
from fovea.core.settings import build_settings, flat_values
from fovea.engine.config.memory import KVSettings, OutputSettings, PixelSettings
from fovea.engine.config.model import ModelSettings
from fovea.engine.config.others import EventSettings, ParallelSettings, PeerSettings
from fovea.engine.config.schedule import ScheduleSettings, SpeculationSettings, VisualSettings


class EngineOptions(TypedDict, total=False):
    """Keyword arguments of `EngineConfig.of` and `Engine.from_pretrained`.

    A test compares it with the settings.
    """

    dtype: str
    quantization: str
    device: str
    threads: int
    pin_threads: bool
    kernels: str
    decode_graphs: str
    compile: str
    encoder_engines: str
    revision: str
    mmproj: str
    tool_format: str
    reasoning: str
    special_tokens_in_text: bool
    block_size: int
    kv_cache_mib: int
    kv_blocks: int
    kv_dtype: str
    kv_keep: str
    kv_host_mib: int
    state_cache_mib: int
    state_spacing: int
    kv_ttl_s: int
    max_context: int
    prefix_cache: bool
    embed_cache_mib: int
    embed_host_mib: int
    embed_disk_dir: str
    embed_disk_mib: int
    embed_ttl_s: int
    region_cache_mib: int
    pixel_pool_mib: int
    pixel_cache_mib: int
    pixel_ttl_s: int
    preprocess_workers: int
    frame_workers: int
    policy: str
    max_passes: int
    pace: float
    target_itl_ms: int
    target_ttft_ms: int
    target_percentile: float
    when_late: str
    max_running: int
    max_step_tokens: int
    max_step_visual_tokens: int
    max_draft_tokens: int
    max_queue: int
    when_full: str
    detail_policy: str
    degrade_from: float
    degrade_by: str
    visual_tokens: str
    speculate: str
    speculative_tokens: int
    answer_cache_mib: int
    draft_layer: str
    draft_model: str
    draft_quantization: str
    role: str
    encode_peers: str
    prefill_peers: str
    peer_key: str
    peer_timeout_s: float
    remote_prefill_tokens: int
    connector: str
    transfer_dir: str
    transfer_mib: int
    transfer_host: str
    transfer_protocol: str
    tensor_parallel: int
    pipeline_parallel: int
    parallel_timeout_s: int
    kv_events: str
    kv_events_replay: str
    kv_events_topic: str
    encoder_events: str
    encoder_events_replay: str
    events_kept: int
    event_rank: int


MIB = 1024 * 1024
ENCODER_BLOCKS = 64
"""KV blocks of an engine that only encodes images."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of one engine.

    model: number types, device, kernels.
    kv: the KV pool and shared prefixes.
    outputs: caches of encoder outputs.
    pixels: processed pixels.
    schedule: scheduling and admission.
    visual: detail levels and visual tokens.
    speculation: expected tokens.
    peers: role, and engines that work for this one.
    parallel: the processes that compute the model together.
    events: announcements of what the caches hold.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    kv: KVSettings = field(default_factory=KVSettings)
    outputs: OutputSettings = field(default_factory=OutputSettings)
    pixels: PixelSettings = field(default_factory=PixelSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    visual: VisualSettings = field(default_factory=VisualSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    peers: PeerSettings = field(default_factory=PeerSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    events: EventSettings = field(default_factory=EventSettings)

    @classmethod
    def of(cls, **settings: Unpack[EngineOptions]) -> EngineConfig:
        """A configuration from flat names: `EngineConfig.of(kv_blocks=64, pace=3.0)`. Raises ConfigError."""
        return build_settings(cls, settings)

    def check_on(self, device: Device, dtype: str) -> None:
        """Raise ConfigError if the types of weights, or of keys and values, cannot run on a device.

        device: the one that the model is loaded to, or a stand-in for one. dtype: type of all other numbers.
        """
        # torch's kernels read keys and values of all types, on every device.
        kv = "auto" if self.model.kernels in ("onednn", "torch") else self.kv.kv_dtype
        check_precision(self.model.quantization, dtype, kv, device)

    def for_role(self) -> EngineConfig:
        """Return the settings without what the engine's role has no use for."""
        if self.peers.role == "encode":  # it computes no prompts
            return self.changed(speculate="off", kv_blocks=ENCODER_BLOCKS, max_context=0, kv_host_mib=0)
        return self.changed(speculate="off") if self.peers.role == "prefill" else self

    def changed(self, **settings: Unpack[EngineOptions]) -> EngineConfig:
        """A copy with some settings replaced. Raises ConfigError."""
        return build_settings(EngineConfig, flat_values(self) | settings)
