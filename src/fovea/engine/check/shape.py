"""Reads the shape of a checkpoint for the planner from its configuration. No weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fovea.core.errors import CheckpointError
from fovea.engine.load import build_model, read_config, served_name, untie_own_head
from fovea.engine.models.weights import find_shards, tensor_names
from fovea.engine.profile.shape import shape_of
from fovea.planner.shape import ModelShape


def shape_of_folder(folder: Path, name: str = "") -> ModelShape:
    """Return the shape of a checkpoint's model in seconds. The folder needs config.json; weights may lack.

    name: name of the shape; "": the folder's.

    Raises CheckpointError or UnsupportedModel.
    """
    config = read_config(folder)
    untie_own_head(config, _stored_names(folder))
    return shape_of_config(folder, config, name or served_name(str(folder)))


def shape_of_config(folder: Path, config: Any, name: str) -> ModelShape:
    """Return the shape of a configuration.

    folder: where it was read, for errors.
    config: a transformers configuration, see `load.read_config`.
    name: name of the shape.

    Raises CheckpointError or UnsupportedModel.
    """
    # A 16-bit type, so that those numbers that stay float32 can be told from the others.
    model = build_model(folder, config, torch.device("meta"), torch.bfloat16)
    return shape_of(model, name, config.model_type)


def _stored_names(folder: Path) -> Iterator[str]:
    """Names of the tensors of those files that are there, and of the index."""
    try:
        shards = find_shards(folder)
    except CheckpointError:
        return
    yield from shards.index
    yield from tensor_names(shards.files)
