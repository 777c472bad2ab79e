"""All settings of the engine, by subject; they are frozen after construction. It must not import torch.

Each setting is declared once, in its subject's file, with type, default, range and help (`core.settings`).
Python code reads `config.kv.block_size`; flags, environment variables, TOML files and `EngineConfig.of` use
the flat name `block_size`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Unpack

from fovea.core.settings import build_settings, flat_values
from fovea.engine.config.memory import KVSettings, OutputSettings, PixelSettings
from fovea.engine.config.model import ModelSettings
from fovea.engine.config.options import EngineOptions
from fovea.engine.config.schedule import ScheduleSettings
from fovea.engine.config.visual import VisualSettings

__all__ = [
    "MIB",
    "EngineConfig",
    "EngineOptions",
    "KVSettings",
    "ModelSettings",
    "OutputSettings",
    "PixelSettings",
    "ScheduleSettings",
    "VisualSettings",
]
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of one engine.

    model: number types, device, kernels.
    kv: the KV pool and shared prefixes.
    outputs: caches of encoder outputs.
    pixels: processed pixels.
    schedule: scheduling and admission.
    visual: detail levels and visual tokens.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    kv: KVSettings = field(default_factory=KVSettings)
    outputs: OutputSettings = field(default_factory=OutputSettings)
    pixels: PixelSettings = field(default_factory=PixelSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    visual: VisualSettings = field(default_factory=VisualSettings)

    @classmethod
    def of(cls, **settings: Unpack[EngineOptions]) -> EngineConfig:
        """A configuration from flat names: `EngineConfig.of(kv_blocks=64, pace=3.0)`. Raises ConfigError."""
        return build_settings(cls, settings)

    def changed(self, **settings: Unpack[EngineOptions]) -> EngineConfig:
        """A copy with some settings replaced. Raises ConfigError."""
        return build_settings(EngineConfig, flat_values(self) | settings)
