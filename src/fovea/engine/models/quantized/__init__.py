"""Opens the weights of a checkpoint, whatever their format."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fovea.core.errors import CheckpointError, UnsupportedModel
from fovea.engine.files import read_json
from fovea.engine.models.stored import SafetensorsWeights, StoredWeights, shard_files

if TYPE_CHECKING:
    from fovea.engine.models.quantized.base import Family

log = logging.getLogger("fovea.engine")
FAMILIES = {
    "awq": ("gptq", "Awq"),
    "bitsandbytes": ("bitsandbytes", "BitsAndBytes"),
    "compressed-tensors": ("compressed", "CompressedTensors"),
    "fbgemm_fp8": ("fp8", "Fp8"),
    "fp8": ("fp8", "Fp8"),
    "gptq": ("gptq", "Gptq"),
}
"""Module and class of each way to quantize, by the name in a checkpoint's configuration."""
SECTIONS = ("text_config", "llm_config", "language_config")
"""Sections of a configuration that may say how the checkpoint is quantized, if the whole does not."""


def open_weights(folder: Path, config: Any) -> StoredWeights:
    """Return the weights of a checkpoint.

    config: its configuration, as transformers reads it.

    Raises CheckpointError if files are missing or broken, UnsupportedModel for an unknown way to quantize.
    """
    family = find_family(folder)
    raw = SafetensorsWeights(shard_files(folder))
    if family is None:
        return raw
    from fovea.engine.models.quantized.base import QuantizedSafetensors

    return QuantizedSafetensors(raw, family)


def find_family(folder: Path) -> Family | None:
    """Return the way in which a checkpoint is quantized; None: it is not.

    Raises CheckpointError or UnsupportedModel if it cannot be read.
    """
    content = read_json(folder / "config.json")
    for section in ("", *SECTIONS):
        part = content.get(section) if section else content
        for name in ("quantization_config", "compression_config"):
            settings = part.get(name) if isinstance(part, Mapping) else None
            if settings:
                where = f"{section}: {name}" if section else name
                return _family(folder, settings, f"{folder / 'config.json'}: {where}")
    return None


def log_notes(folder: Path, stored: StoredWeights) -> None:
    """Log what a user should know about weights that are kept as they are stored, a line each."""
    for note in getattr(stored, "notes", ()):
        log.info("%s is quantized (%s): %s", folder, stored.quantization, note)


def _family(folder: Path, settings: Any, place: str) -> Family:
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{place} is {str(settings)[:50]!r}; accepted: an object")
    method = settings.get("quant_method")
    if method is None and "config_groups" in settings:
        method = "compressed-tensors"  # Early versions of that format did not name it.
    entry = FAMILIES.get(method.lower()) if isinstance(method, str) else None
    if entry is None:
        raise UnsupportedModel(
            f"{folder} is quantized by {str(method)[:50]!r}; accepted: {', '.join(FAMILIES)}, and plain "
            "weights, which --quantization rounds while they are loaded"
        )
    module, name = entry
    family: Family = getattr(import_module(f"fovea.engine.models.quantized.{module}"), name)(settings, place)
    return family
