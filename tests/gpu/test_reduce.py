"""On a card the same tokens are kept as on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fovea.engine.reduce.registry import reducer
from fovea.engine.visual_budget.methods import METHODS
from tests.support.reduction import reduction_input

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("name", [name for name, found in METHODS.items() if found.after == "encoder"])
def test_the_same_tokens_as_on_the_cpu(name: str) -> None:
    image = reduction_input(12, 14, width=64)
    assert image.probe is not None
    fields = ("embeds", "query", "attention", "keys")
    moved = {field: getattr(image, field).cuda() for field in fields}
    states = {field: getattr(image.probe, field).cuda() for field in ("hidden", "keys", "scores")}
    there = replace(image, **moved, probe=replace(image.probe, **states))
    here, made = reducer(name).reduce(image, 50), reducer(name).reduce(there, 50)
    assert made.index.is_cuda
    assert made.embeds.is_cuda
    assert made.index.tolist() == here.index.tolist()
    torch.testing.assert_close(made.embeds.cpu(), here.embeds)
