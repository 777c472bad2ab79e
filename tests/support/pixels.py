"""Pixels of image processors in the form that transformers' processors return."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def in_time(patches: NDArray[np.float32], frames: int = 2) -> NDArray[np.float32]:
    """Repeat patches of still images, (patches, 3 * area), for all frames: (patches, 3 * frames * area)."""
    planes = patches.reshape(len(patches), 3, 1, -1)
    return np.repeat(planes, frames, axis=2).reshape(len(patches), -1)
