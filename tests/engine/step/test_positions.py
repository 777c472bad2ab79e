"""M-RoPE positions agree with those of transformers, on random layouts of text and images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings

from fovea.engine.sequence import ImageSpan
from fovea.engine.step.positions import mrope_positions
from tests.support.thorough import examples

IMAGE, TEXT, MERGE = 9, 1, 2
MODELS = {
    "qwen2_vl": (hf.Qwen2VLModel, hf.Qwen2VLConfig),
    "qwen2_5_vl": (hf.Qwen2_5_VLModel, hf.Qwen2_5_VLConfig),
    "qwen3_vl": (hf.Qwen3VLModel, hf.Qwen3VLConfig),
    "paddleocr_vl": (hf.PaddleOCRVLModel, hf.PaddleOCRVLConfig),
    "glm4v": (hf.Glm4vModel, hf.Glm4vConfig),
}
SEGMENTS = st.lists(
    st.one_of(st.integers(1, 6), st.tuples(st.integers(1, 5), st.integers(1, 5))), min_size=1, max_size=6
)


def oracle(architecture: str) -> Any:
    """Return a model without weights, because positions depend on the configuration alone."""
    kind, config = MODELS[architecture]
    with torch.device("meta"):
        model = kind.__new__(kind)
        torch.nn.Module.__init__(model)
    model.config = config(image_token_id=IMAGE, video_token_id=8, vision_start_token_id=7)
    return model


@pytest.mark.parametrize("architecture", MODELS)
@settings(max_examples=examples(60), deadline=None)
@given(segments=SEGMENTS)
def test_positions_are_those_of_transformers(
    architecture: str, segments: list[int | tuple[int, int]]
) -> None:
    ids: list[int] = []
    spans: list[ImageSpan] = []
    kinds: list[int] = []
    for segment in segments:
        if isinstance(segment, int):
            ids += [TEXT] * segment
            kinds += [0] * segment
            continue
        if ids and ids[-1] == IMAGE:
            ids.append(7)  # two images never touch: each is wrapped in its own markers
            kinds.append(0)
        height, width = segment
        grid = (1, height * MERGE, width * MERGE)
        spans.append(ImageSpan(len(spans), len(ids), height * width, height * width, f"k{len(spans)}", grid))
        ids += [IMAGE] * (height * width)
        kinds += [1] * (height * width)
    positions, delta = mrope_positions(len(ids), spans, MERGE)
    grids = torch.tensor([span.grid for span in spans]) if spans else None
    expected, deltas = oracle(architecture).get_rope_index(
        torch.tensor([ids]), mm_token_type_ids=torch.tensor([kinds], dtype=torch.int32), image_grid_thw=grids
    )
    np.testing.assert_array_equal(positions, expected[:, 0].numpy())
    assert delta == int(deltas.flatten()[0])


def test_text_alone_has_consecutive_positions() -> None:
    positions, delta = mrope_positions(5, [], MERGE)
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert delta == 0


def test_text_continues_after_the_longer_side_of_an_image() -> None:
    """Section 2.1 of arXiv 2409.12191: the longer side counts, not the number of tokens."""
    positions, delta = mrope_positions(6, [ImageSpan(0, 1, 3, 3, "k", (1, 2, 6))], MERGE)
    assert positions.tolist() == [[0, 1, 1, 1, 4, 5], [0, 1, 1, 1, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert delta == 0
    _, delta = mrope_positions(6, [ImageSpan(0, 1, 4, 4, "k", (1, 4, 4))], MERGE)
    assert delta == -2


def test_positions_need_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, fovea.engine.step.positions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0
