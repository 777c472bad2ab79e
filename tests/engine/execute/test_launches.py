"""Decoder layers have few launches in a step that decodes. Without graphs each takes microseconds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU: launches are counted in Triton's interpreter", allow_module_level=True)

from tests.support.checkpoints import ARCHITECTURES
from tests.support.launches import launches
from tests.support.thorough import others_slow

pytestmark = pytest.mark.kernels

MOST = 16
"""Most launches of a layer. In Gemma 3 and in layers with a state there were once 60, with experts 84."""
NOT_COUNTED = ("cross-attention",)
"""Kinds of layers without a limit here: those that read images."""


@pytest.mark.parametrize(
    "architecture",
    others_slow(sorted(ARCHITECTURES), ["gemma3", "gemma4", "lfm2_vl", "mllama", "qwen3_5_moe"]),
)
def test_a_layer_has_few_launches(architecture: str, tmp_path: Path) -> None:
    counts = launches(architecture, tmp_path)
    print(architecture, counts)
    checked = {name: count for name, count in counts.items() if not name.startswith(NOT_COUNTED)}
    assert checked
    for name, count in checked.items():
        assert count <= MOST, f"{name}: {count} launches"
