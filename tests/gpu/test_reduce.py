"""Token reduction keeps the same tokens on a GPU as on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fovea.engine.reduce import methods
from fovea.engine.reduce.base import ReductionInput
from fovea.engine.reduce.methods import reducer
from fovea.engine.visual_budget.methods import METHODS
from tests.support import gpu
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
