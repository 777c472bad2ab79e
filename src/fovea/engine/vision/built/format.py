"""What a kind of built encoder promises. One file per kind, imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from fovea.core.errors import ConfigError

RunPart = Callable[[Tensor], tuple[Tensor, ...]]
"""A part as `nn.Module` would be called: rows in; rows, and DeepStack's features, out."""


class Format(Protocol):
    """suffix: of its files. packages: whose versions are written down. shares_weights: parts read the model's own plain
    weights, so that a file holds code alone and serves every part of its shape."""

    suffix: str
    packages: tuple[str, ...]
    shares_weights: bool

    def check(self, device: torch.device) -> None:
        """Raises ConfigError where it can not be built or run."""
        ...

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        """In which a model of that type is computed."""
        ...

    def build(self, part: nn.Module, x: Tensor, path: Path) -> None:
        """Write the part, for inputs of the shape, type and device of x."""
        ...

    def load(self, path: Path, part: nn.Module) -> RunPart:
        """part: the same over the model's own layers, for its weights."""
        ...


def format_named(name: str) -> Format:
    return cast("Format", import_module(f"fovea.engine.vision.built.{name}").FORMAT)


def need(package: str, extra: str) -> None:
    """Raises ConfigError where a package is missing, with the line that installs it."""
    try:
        import_module(package)
    except ImportError as error:
        raise ConfigError(f"{package} is not installed; pip install {extra}", param="format") from error
