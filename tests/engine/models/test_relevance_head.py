"""A relevance head whose arrays do not fit is an error at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fovea.core.errors import CheckpointError
from fovea.engine.models.weights import PATH, read_head

HEAD = {
    "image.weight": (8, 64),
    "words.weight": (8, 64),
    "query.weight": (8, 8),
    "hidden.weight": (4, 24),
    "coupling.weight": (1, 4),
    "image.bias": (8,),
    "words.bias": (8,),
    "query.bias": (8,),
    "hidden.bias": (4,),
    "coupling.bias": (1,),
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"query.bias": None}, "has no tensor 'query.bias'"),
        ({"query.weight": (8, 9)}, r"query.weight has shape \[8, 9\]; accepted: .* shape \[8, 8\]"),
        ({"image.weight": (8,)}, "image.weight has shape|words.weight has shape"),
        ({"raw.0.bias": (2,)}, "raw.0.bias has shape"),
        ({"hidden.bias": np.full(4, np.nan, np.float32)}, "accepted: finite numbers"),
        ({"image.weight": (8, 32), "words.weight": (8, 32)}, "of 32 values; the model's have 64"),
    ],
)
def test_a_relevance_head_of_other_shapes(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    """It was read at the start and failed in every request that used it."""
    parts = {name: shape for name, shape in (HEAD | change).items() if shape is not None}
    arrays = {n: np.zeros(s, np.float32) if isinstance(s, tuple) else s for n, s in parts.items()}
    (tmp_path / PATH).parent.mkdir()
    save_file(arrays, tmp_path / PATH)
    with pytest.raises(CheckpointError, match=says):
        read_head(tmp_path, 64)
