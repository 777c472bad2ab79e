from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.checkpoints import write
from tests.support.reduced import QWEN, roomy


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny models by architecture; Qwen's have room for regions."""

    @cache
    def made(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        return roomy(architecture, folder) if architecture in QWEN else write(architecture, folder)

    return made
