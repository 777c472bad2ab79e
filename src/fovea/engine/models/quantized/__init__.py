"""Opens the weights of a checkpoint, whatever their format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.models.stored import SafetensorsWeights, StoredWeights, shard_files


def open_weights(folder: Path, config: Any) -> StoredWeights:
    """Return the weights of a checkpoint.

    config: its configuration, as transformers reads it.

    Raises CheckpointError if files are missing or broken, UnsupportedModel for an unknown way to quantize.
    """
    expect_known(folder, config)
    return SafetensorsWeights(shard_files(folder))


def expect_known(folder: Path, config: Any) -> None:
    """Raise UnsupportedModel if the checkpoint is quantized in a way that cannot be read."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    named = f" ({method[:50]})" if isinstance(method, str) else ""
    raise UnsupportedModel(
        f"{folder} is quantized{named}; unquantized safetensors are supported, "
        "and --quantization quantizes them while they are loaded"
    )
