"""The texture on the card is the one in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fovea.kernels.texture import texture
from fovea.relevance.texture import texture as in_numpy
from tests.kernels.test_texture import images

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def test_it_agrees_with_numpy() -> None:
    stack = images(9, 896, 896)
    found = texture(torch.from_numpy(stack).cuda(), 28).cpu().numpy()
    for image, channels in zip(stack, found, strict=True):
        assert np.abs(channels - in_numpy(image, 28).channels).max() < 1e-4
