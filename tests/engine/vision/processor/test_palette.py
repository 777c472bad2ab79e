"""Tests of the types in which processors write normalised pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fovea.core.errors import EngineError
from fovea.engine.models.base import value_tensor
from fovea.engine.vision.processor import build
from fovea.engine.vision.processor.pixels import Palette, in_type
from fovea.engine.vision.processor.settings import Settings

PALETTE = Palette.read(Settings({}))
TYPES = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("name", TYPES)
def test_values_are_rounded_as_torch_rounds_them(name):
    """The engine rounded float32 values on its own thread before the kernels wrote the encoder's type."""
    expected = torch.from_numpy(PALETTE.table).to(getattr(torch, name))
    assert torch.equal(value_tensor(PALETTE.in_type(name).table), expected)


def test_all_palettes_of_a_processor_get_the_type():
    settings = {"image_grid_pinpoints": [[336, 672]], "size": {"shortest_edge": 336}, "crop_size": 336}
    vision = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
    nested = build("llava_next", settings, {"vision_config": vision}, {})
    assert in_type(nested, "bfloat16").anyres.palette.table.dtype == np.uint16
    exact = build("gemma4", {}, {"vision_config": {"patch_size": 16, "pooling_kernel_size": 3}}, {})
    assert in_type(exact, "bfloat16").palette.table.dtype == np.float32
    with pytest.raises(EngineError, match="float8; accepted: float32, float16, bfloat16"):
        PALETTE.in_type("float8")
