from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import write


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny products gain nothing from threads, and a busy machine makes them wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL: any resolution, M-RoPE, DeepStack."""
    return write("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="session")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Idefics3: tiles with text between them, so a span holds more than visual tokens."""
    return write("idefics3", tmp_path_factory.mktemp("idefics3"))
