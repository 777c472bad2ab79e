"""Finds the built encoders of a model, checks whether they fit, and installs them."""

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
ENGINES_FOLDER = "fovea-engines"
"""Name of the folder of built encoders beside a checkpoint's files."""


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """A folder of built encoders whose manifest is readable.

    Whether the encoders fit is not known yet: `install` checks it when the weights are loaded.

    folder: its path.
    manifest: the content of its manifest.json.
    """

    folder: Path
    manifest: Manifest


def find_engines(
    where: str, checkpoint: Path, model: VisionLanguageModel, quantization: str
) -> EngineFolder | None:
    """Find the folder of built encoders for a model, or log a warning and return None.

    where: "off", "auto" (the folder beside the checkpoint) or a folder.
    checkpoint: folder of the checkpoint.
    quantization: the model's quantization. Encoders are used only with "none".

    Raises ConfigError for a folder that is named explicitly and has no manifest.
    """
    if where == "off":
        return None
    folder = checkpoint / ENGINES_FOLDER if where == "auto" else Path(where).expanduser()
    if not (folder / NAME).is_file():
        if where != "auto":
            raise ConfigError(f"{folder} has no {NAME}; fovea build writes one", param="encoder_engines")
        log.warning("no encoder engines: %s has no %s; fovea build writes one", folder, NAME)
        return None
    if model.static_encoder() is None:
        log.warning(
            "encoder engines of %s are not used: this architecture has no encoder that can be built", folder
        )
        return None
    if quantization != "none":
        log.warning(
            "encoder engines of %s are not used: the encoder is quantized to %s", folder, quantization
        )
        return None
    manifest = read_manifest(folder)
    return None if manifest is None else EngineFolder(folder, manifest)


def install(model: VisionLanguageModel, engine_folder: EngineFolder, here: Site) -> EncoderEngines:
    """Load the built encoders that fit, and give them to the model.

    The model's weights must be loaded and not packed yet. A format that shares them keeps the plain weights
    alive.
    """
    encoder = model.static_encoder()
    assert encoder is not None

    def cut(grid: Grid, blocks: int) -> list[torch.nn.Module]:
        return [segment.module for segment in encoder.segments(grid, blocks)]

    model.engines = open_engines(engine_folder.folder, engine_folder.manifest, here, cut)
    return model.engines


def describe_site(model: VisionLanguageModel, architecture: str) -> Site:
    """Return the site of a model: its weights, its device and the versions of packages.

    Call it before any layer is packed.

    Reads all weights of the encoder, which takes about a second per GB.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    packages = {package for name in FORMATS for package in format_named(name).packages}
    return Site(
        fingerprint(model.encoder_modules(), architecture, dtype),
        dtype,
        model.device.type,
        capability(model.device),
        {name: _version(name) for name in sorted(packages | {"fovea"})},
    )


def capability(device: torch.device) -> tuple[str, ...]:
    """Targets of machine code on a device: a CPU's instruction sets, or a GPU's name and generation."""
    if device.type != "cuda":
        return instruction_sets()
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), f"sm_{major}{minor}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
