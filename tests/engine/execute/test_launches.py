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
"""Most launches of a layer with a dense block. In Gemma 3 and in layers with a state there were once 60."""
EXPERTS = {
    "deepseek_ocr2": {"attention, experts": 32},
    "qwen3_5_moe": {"attention, experts": 38, "state, experts": 36},
    "qwen3_vl_moe": {"attention, experts": 29},
}
"""Experts are computed by torch's operations: routing alone is about 15 of them."""
NOT_COUNTED = ("cross-attention",)
"""Kinds of layers without a limit here: those that read images."""


@pytest.mark.parametrize(
    "architecture",
    others_slow(sorted(ARCHITECTURES), ["gemma3", "gemma4", "lfm2_vl", "mllama", "qwen3_5"]),
)
def test_a_layer_has_few_launches(architecture: str, tmp_path: Path) -> None:
    counts = launches(architecture, tmp_path)
    print(architecture, counts)
    limits = EXPERTS.get(architecture, {})
    checked = {name: count for name, count in counts.items() if not name.startswith(NOT_COUNTED)}
    assert checked
    for name, count in checked.items():
        assert count <= limits.get(name, MOST), f"{name}: {count} launches"


BLOCK = 12
"""Most launches of an encoder's block."""
MORE = {"qwen2_vl": 13, "gemma4": 79, "idefics3": 21, "smolvlm": 21}
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
    assert found[0] <= MORE.get(architecture, BLOCK)
    assert found[1] < 40, "launches of an image outside of the blocks"
