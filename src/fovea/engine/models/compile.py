"""Compiled parts of a model: torch.compile for what surrounds attention, and built encoders.

Attention itself is not compiled: it reads tables that change with every step, and its kernels are torch's
best already. Layers name the methods to compile in the attribute `rowwise`. All layers of a class share the
code that is compiled for the first of them. So a method is compiled once per class for any number of rows,
and once more for a single row.

Built encoders come from `fovea build`. They are found, checked for whether they fit, and installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fovea.core.errors import ConfigError
from fovea.core.hardware import instruction_sets
from fovea.engine.config.model import CompileModes
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.tiers import fingerprint
from fovea.engine.vision.built.engines import EncoderEngines, open_engines, read_manifest
from fovea.engine.vision.built.formats import format_named
from fovea.engine.vision.built.manifest import FORMATS, NAME, Manifest, Site
from fovea.kernels.base import Kernels
from fovea.kernels.choose import secure_torch_cache
from fovea.kernels.native.build import compiler

Rowwise = Callable[..., Tensor]
log = logging.getLogger("fovea.engine")
ENGINES_FOLDER = "fovea-engines"
"""Name of the folder of built encoders beside a checkpoint's files."""


def check_compile(modes: CompileModes, kernels: Kernels, quantization: str) -> None:
    """Raise ConfigError if torch cannot compile the model's layers.

    The reasons are packed products, Fovea's own kernels, quantization, and a missing C++ compiler.
    """
    if not modes.active:
        return
    names = ", ".join(f"{name}={mode}" for name, mode in modes.active.items())
    if not kernels.plain:
        raise ConfigError(
            f"compile asks for {names}, but the model runs on kernels that torch cannot compile; "
            "--kernels torch uses only kernels that it can",
            param="compile",
        )
    if quantization != "none":
        raise ConfigError(
            f"compile asks for {names}, which cannot be combined with quantization", param="compile"
        )
    if not torch.cuda.is_available() and not compiler():
        raise ConfigError(f"compile asks for {names}, but this machine has no C++ compiler", param="compile")


def compile_modules(model: VisionLanguageModel, modes: CompileModes) -> None:
    """Replace the `rowwise` methods of the chosen components by compiled ones. All weights must be loaded.

    torch compiles a method when it is called for the first time.
    """
    if modes.active:
        secure_torch_cache()
    projector = {layer for module in model.projector_modules() for layer in module.modules()}
    encoder = [
        layer for module in model.encoder_modules() for layer in module.modules() if layer not in projector
    ]
    components: dict[str, Iterable[nn.Module]] = {
        "encoder": encoder,
        "projector": projector,
        "decoder": model.decoder.modules(),
    }
    for name, mode in modes.active.items():
        for layer in components[name]:
            for method in getattr(layer, "rowwise", ()):
                setattr(layer, method, _compile(getattr(layer, method), mode, model.device))


def _compile(method: Rowwise, mode: str, device: torch.device) -> Rowwise:
    # None is the mode "default": with a mode's name torch would refuse further options.
    fast: Rowwise = torch.compile(method, mode=None if mode == "default" else mode, dynamic=True)
    if device.type != "cuda" or mode == "default":
        return fast

    def apply(*rows: Any) -> Tensor:
        # These modes replay CUDA graphs. The next replay overwrites the output, so the caller gets a copy.
        return fast(*rows).clone()

    return apply


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

    model.engines = open_engines(engine_folder.folder, engine_folder.manifest, here, encoder.segments)
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
