"""Built encoders of a model: where they are, whether they fit, and how they get to it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from fovea.core.errors import ConfigError
from fovea.core.hardware import instruction_sets
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.tiers.disk import fingerprint
from fovea.engine.vision.built.engines import EncoderEngines, open_engines, read_manifest
from fovea.engine.vision.built.format import format_named
from fovea.engine.vision.built.manifest import FORMATS, NAME, Grid, Manifest, Site

log = logging.getLogger("fovea.engine")
BESIDE = "fovea-engines"
"""The folder beside a checkpoint's files."""


@dataclass(frozen=True, slots=True)
class Found:
    """A folder whose manifest can be read; whether it fits is known when the weights are in."""

    folder: Path
    manifest: Manifest


def look(where: str, checkpoint: Path, model: VisionLanguageModel, quantization: str) -> Found | None:
    """where: "off", "auto" (beside the checkpoint) or a folder. None, and a line in the log, where nothing can be used.

    Raises ConfigError for a folder that was named and has no manifest at all.
    """
    if where == "off":
        return None
    folder = checkpoint / BESIDE if where == "auto" else Path(where).expanduser()
    if not (folder / NAME).is_file():
        if where != "auto":
            raise ConfigError(f"{folder} has no {NAME}; fovea build makes one", param="encoder_engines")
        log.warning("no encoder engines: %s has no %s; fovea build makes one", folder, NAME)
        return None
    if model.static_encoder() is None:
        log.warning("encoder engines of %s are not used: this architecture has none", folder)
        return None
    if quantization != "none":
        log.warning(
            "encoder engines of %s are not used: the encoder is quantized to %s", folder, quantization
        )
        return None
    manifest = read_manifest(folder)
    return None if manifest is None else Found(folder, manifest)


def install(model: VisionLanguageModel, found: Found, here: Site) -> EncoderEngines:
    """The model's weights are in and not packed yet; a format that shares them keeps the plain ones alive."""
    encoder = model.static_encoder()
    assert encoder is not None

    def cut(grid: Grid, blocks: int) -> list[torch.nn.Module]:
        return [part.module for part in encoder.parts(grid, blocks)]

    model.engines = open_engines(found.folder, found.manifest, here, cut)
    return model.engines


def site(model: VisionLanguageModel, architecture: str) -> Site:
    """Before anything is packed. Reads all weights of the encoder, about a second per GB."""
    dtype = str(model.dtype).removeprefix("torch.")
    packages = {package for name in FORMATS for package in format_named(name).packages}
    return Site(
        fingerprint(model.encoder_parts(), architecture, dtype),
        dtype,
        model.device.type,
        capability(model.device),
        {name: _version(name) for name in sorted(packages | {"fovea"})},
    )


def capability(device: torch.device) -> tuple[str, ...]:
    """What machine code may be made for: a CPU's instruction sets, or a GPU's name and generation."""
    if device.type != "cuda":
        return instruction_sets()
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), f"sm_{major}{minor}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
