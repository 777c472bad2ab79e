"""Compiled components give the answers of plain ones, and are refused if torch cannot compile the model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea import Engine
from fovea.core.errors import ConfigError
from fovea.engine.config.model import CompileModes
from fovea.engine.models.compile import check_compile
from fovea.kernels.native.build import compiler
from fovea.kernels.torch_kernels import TorchKernels
from tests.support.checkpoints import write
from tests.support.engines import SETTINGS, ask, picture

TORCH = {**SETTINGS, "kernels": "torch"}
MOST_GRAPHS = 12
"""Largest number of graphs: `before`, `after` and up to two mergers, each for one row and for many."""


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "llava"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, tmp_path_factory.mktemp("compiled") / request.param)


def counters() -> Any:
    """Return torch's counts of compiled graphs.

    The import takes a second, and every worker collects this file.
    """
    from torch._dynamo.utils import counters

    return counters


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Drop compiled code between tests: torch limits how often it compiles a function."""
    torch.compiler.reset()
    counters().clear()
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("modes", ["default", "encoder=default,decoder=reduce-overhead"])
def test_answers_are_those_of_plain_torch(folder: Path, modes: str) -> None:
    prompts = [ask("What is it?", picture(seed, 96 + 32 * seed, 64)) for seed in range(3)]

    def answers(compile: str) -> list[list[int]]:
        with Engine.from_pretrained(str(folder), **TORCH, compile=compile) as engine:
            return [
                list(engine.generate(prompt, temperature=0, max_tokens=8, ignore_eos=True).token_ids[0])
                for prompt in prompts
            ]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own code
        plain, graphs = answers("off"), counters()["stats"]["unique_graphs"]
        assert graphs == 0
        assert answers(modes) == plain
    # Layers of a class share graphs. A graph per layer would be more: these models have at least six layers.
    assert 0 < counters()["stats"]["unique_graphs"] <= MOST_GRAPHS
    assert not counters()["recompile_limit"]


def test_packed_products_cannot_be_compiled(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--kernels torch"):
        Engine.from_pretrained(str(folder), **SETTINGS, kernels="onednn", compile="encoder=default")


def test_quantized_products_cannot_be_compiled(folder: Path) -> None:
    with pytest.raises(ConfigError, match="quantization"):
        Engine.from_pretrained(str(folder), **TORCH, quantization="int8", compile="default")


def test_a_compiler_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea.engine.models.compile.compiler", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler"):
        check_compile(CompileModes("default"), TorchKernels(), "none")
    check_compile(CompileModes(), TorchKernels(), "none")


def test_the_compiler_comes_from_cxx_or_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "ccache g++ -O1")
    assert compiler() == ["ccache", "g++", "-O1"]
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert compiler() == []
