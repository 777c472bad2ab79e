"""Tiny random checkpoints of every architecture, and their shapes, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from fovea.engine.check import shape_of_folder
from fovea.planner.shape import ModelShape
from tests.support.checkpoints import write


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny model by its architecture."""

    @cache
    def write_checkpoint(architecture: str) -> Path:
        return write(architecture, tmp_path_factory.mktemp(architecture))

    return write_checkpoint


@pytest.fixture(scope="session")
def planned(checkpoint: Callable[[str], Path]) -> Callable[[str], ModelShape]:
    """Return the shape of a tiny model by its architecture, read from config.json alone."""

    @cache
    def read_shape(architecture: str) -> ModelShape:
        return shape_of_folder(checkpoint(architecture))

    return read_shape
