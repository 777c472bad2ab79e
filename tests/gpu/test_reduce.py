"""Token reduction keeps the same tokens on a GPU as on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fovea import Engine
from fovea.core.media import PixelBudget, VisualTokens
from fovea.engine.reduce import methods
from fovea.engine.reduce.base import ReductionInput
from fovea.engine.reduce.methods import reducer
from fovea.engine.visual_budget.methods import METHODS
from tests.support import gpu
from tests.support.checkpoints import write
from tests.support.engines import picture
from tests.support.reduction import reduction_input

pytestmark = gpu.MARKS


def determinant(image: ReductionInput, index: Tensor) -> float:
    """Logarithm of the determinant of the tokens that DPP has chosen: it searches the largest one."""
    kernel = methods.dpp_kernel(
        methods.weighted_rows(image.embeds, None), methods.cells(image.grid, image.embeds.device)
    )
    return float(torch.logdet(kernel[index][:, index].double()))


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.kind == "encoder"])
def test_the_same_tokens_as_on_the_cpu(name: str) -> None:
    image = reduction_input(12, 14, width=64)
    assert image.probe is not None
    fields = ("embeds", "query", "attention", "keys")
    tensors = {field: getattr(image, field).to(gpu.DEVICE) for field in fields}
    states = {field: getattr(image.probe, field).to(gpu.DEVICE) for field in ("hidden", "keys", "scores")}
    gpu_image = replace(image, **tensors, probe=replace(image.probe, **states))
    on_cpu, on_gpu = reducer(name).reduce(image, 50), reducer(name).reduce(gpu_image, 50)
    assert on_gpu.index.device.type == on_gpu.embeds.device.type == gpu.DEVICE.type
    if name == "dpp":
        # Without words all tokens are equally good as the first one. Rounding chooses it, and so all others.
        assert determinant(image, on_gpu.index.cpu()) > determinant(image, on_cpu.index) - 0.1
        return
    assert on_gpu.index.tolist() == on_cpu.index.tolist()
    torch.testing.assert_close(on_gpu.embeds.cpu(), on_cpu.embeds)


def test_a_look_finds_the_same_as_on_the_cpu(tmp_path: Path) -> None:
    """The method relevance: the decoder's attention to a small view, and the tokens that are chosen by it."""
    folder = write("qwen3_vl", tmp_path)
    image = picture(320, 256)
    budget = PixelBudget(visual=VisualTokens("relevance", 0.5, explain=True))
    options: dict[str, Any] = {"budget": budget, "temperature": 0, "max_tokens": 1}
    cpu = {"device": "cpu", "kernels": "torch", "kv_cache_mib": 16}
    with Engine.from_pretrained(str(folder), dtype="float32", **cpu) as engine:
        [on_cpu] = engine.generate("what is it?", [image], **options).images
    with gpu.engine_of(folder, dtype="float32", kernels="torch") as engine:
        [on_gpu] = engine.generate("what is it?", [image], **options).images
    assert on_cpu.relevance is not None
    assert on_gpu.relevance is not None
    assert on_gpu.tokens == on_cpu.tokens
    ours, theirs = (np.array(use.relevance["map"]) for use in (on_gpu, on_cpu) if use.relevance)
    assert np.abs(ours - theirs).max() < 0.02
