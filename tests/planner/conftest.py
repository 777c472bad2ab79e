"""Tiny random checkpoints of every architecture, written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.checkpoints import write


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny model by its architecture."""

    @cache
    def write_checkpoint(architecture: str) -> Path:
        return write(architecture, tmp_path_factory.mktemp(architecture))

    return write_checkpoint
