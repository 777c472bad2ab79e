from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import write
from tests.support.reduced import ANY_SIZE, roomy


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Use one thread: small products gain nothing from more, and threads wait for a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL: any resolution, M-RoPE, DeepStack."""
    return write("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="session")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Idefics3: tiles with text between them, so a span holds more than visual tokens."""
    return write("idefics3", tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5: two layers with a state before each layer of attention."""
    return write("qwen3_5", tmp_path_factory.mktemp("qwen3_5"))


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3: sliding windows on two of three layers, and tokens of an image that see each other."""
    return write("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="session")
def crossing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama 3.2 Vision: text attends to the states of images outside of the prompt."""
    return write("mllama", tmp_path_factory.mktemp("mllama"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny models by architecture; Qwen's have room for regions."""

    @cache
    def write_checkpoint(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        return roomy(architecture, folder) if architecture in ANY_SIZE else write(architecture, folder)

    return write_checkpoint
