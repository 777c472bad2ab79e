"""Decoder layers have few launches in a step that decodes. Without graphs each takes microseconds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU: launches are counted in Triton's interpreter", allow_module_level=True)

from tests.support.checkpoints import ARCHITECTURES
from tests.support.encoder_launches import encoder_launches
from tests.support.launches import launches
from tests.support.thorough import others_slow

pytestmark = pytest.mark.kernels

MOST = 16
"""Most launches of a layer. In Gemma 3 and in layers with a state there were once 60, with experts 84."""
MORE = {"cross-attention": 18}
"""Layers that read images have more: torch computes their attention, with a mask. There were once 27."""


@pytest.mark.parametrize(
    "architecture",
    others_slow(sorted(ARCHITECTURES), ["gemma3", "gemma4", "lfm2_vl", "mllama", "qwen3_5_moe"]),
)
def test_a_layer_has_few_launches(architecture: str, tmp_path: Path) -> None:
    counts = launches(architecture, tmp_path)
    print(architecture, counts)
    assert counts
    for name, count in counts.items():
        assert count <= MORE.get(name, MOST), f"{name}: {count} launches"


BLOCK = 12
"""Most launches of an encoder's block."""
MORE_IN_BLOCK = {"qwen2_vl": 13, "gemma4": 79, "idefics3": 21, "smolvlm": 21}
"""Quick GELU is three operations. Gemma 4 has eight norms in a block, of torch's operations. Idefics3 masks
the tiles of this image, which are computed one by one."""


@pytest.mark.parametrize(
    "architecture", others_slow(sorted(ARCHITECTURES), ["qwen2_5_vl", "llava", "pixtral"])
)
def test_a_block_of_an_encoder_has_few_launches(architecture: str, tmp_path: Path) -> None:
    found = encoder_launches(architecture, tmp_path)
    if architecture in ("deepseek_ocr2", "mllama"):
        assert found is None, "their blocks are computed image by image"
        return
    assert found is not None
    assert found[0] <= MORE_IN_BLOCK.get(architecture, BLOCK)
    assert found[1] < 40, "launches of an image outside of the blocks"
