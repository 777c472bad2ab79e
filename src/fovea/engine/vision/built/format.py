"""The interface of the formats of built encoders. Every format is one file, imported on first use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from fovea.core.errors import ConfigError

RunSegment = Callable[[Tensor], tuple[Tensor, ...]]
"""A segment as a function: from rows to rows and the DeepStack features of its blocks."""


class Format(Protocol):
    """A format of built encoders.

    suffix: suffix of its file names.
    packages: packages whose versions the manifest records.
    shares_weights: the files hold code alone and read the model's own plain weights, so that all segments of
        one shape share a file.
    """

    suffix: str
    packages: tuple[str, ...]
    shares_weights: bool

    def check(self, device: torch.device) -> None:
        """Raise ConfigError if encoders of this format cannot be built or run on the device."""
        ...

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which this format computes a model of type `dtype`."""
        ...

    def build(self, segment: nn.Module, x: Tensor, path: Path) -> None:
        """Build a segment for inputs of the shape, type and device of x, and write it to a file."""
        ...

    def load(self, path: Path, segment: nn.Module) -> RunSegment:
        """Load a built segment. segment: the module that was built; its weights are the model's."""
        ...


def format_named(name: str) -> Format:
    """Import the format of that name, a key of `manifest.FORMATS`."""
    return cast("Format", import_module(f"fovea.engine.vision.built.{name}").FORMAT)


def require_package(package: str) -> None:
    """Raise ConfigError if a package is missing. The message says how to install it."""
    try:
        import_module(package)
    except ImportError as error:
        raise ConfigError(f"{package} is not installed; pip install {package}", param="format") from error
