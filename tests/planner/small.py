"""A small model and two devices with round numbers, for exact arithmetic."""

from __future__ import annotations

from types import MappingProxyType

from fovea.planner.hardware import Hardware
from fovea.planner.option import Option, evaluate
from fovea.planner.precision import Precision
from fovea.planner.roofline import Setup
from fovea.planner.shape import AttentionLayers, Maps, ModelShape, Tower
from fovea.planner.workload import ImageTokens, Kind, Workload

EXACT = MappingProxyType({"encode": 1.0, "prefill": 1.0, "decode": 1.0, "link": 1.0})
GPU = Hardware(
    "small-gpu", "gpu", "nvidia", 10**9, 1e11, MappingProxyType({"bf16": 1e13, "fp16": 1e13, "fp8": 2e13}),
    usable=1.0, devices=8, link_kind="nvlink", link_bandwidth=1e10, tdp=100.0, price=2.0, efficiency=EXACT,
    capability="9.0",
)  # fmt: skip
CPU = Hardware(
    "small-cpu", "cpu", "amd", 10**9, 1e10, MappingProxyType({"bf16": 1e12, "fp32": 5e11, "int8": 2e12}),
    usable=1.0, price=0.5, efficiency=EXACT,
    capability="avx512",
)  # fmt: skip
SHAPE = ModelShape(
    name="small", family="llava", hidden=64, vocabulary=1000, max_positions=4096, layers=2,
    maps={
        "decoder": (Maps(64, 64, count=8), Maps(64, 256, count=2), Maps(256, 64, count=2)),
        "head": (Maps(1000, 64),),
        "encoder": (Maps(32, 32, count=4),),
        "projector": (Maps(64, 32),),
    },
    attention=(AttentionLayers(2, 2, heads=4, kv_heads=2, head_dim=16),),
    tower=Tower(hidden=32, patches_per_token=1.0, full_layers=1),
    visual_token_numbers=64,
)  # fmt: skip


def pixels_by_64(width: int, height: int) -> ImageTokens:
    """One visual token for each square of 64 by 64 pixels."""
    tokens = max(1, width * height // 4096)
    return ImageTokens(tokens, tokens)


def setup_of(
    shape: ModelShape = SHAPE, device: Hardware = GPU, precision: Precision | None = None, devices: int = 1
) -> Setup:
    return Setup(shape, device, precision or Precision(), devices)


def option_of(setup: Setup | None = None, workload: Workload | None = None) -> Option:
    """A configuration of the small model, by default with one image of 100 tokens."""
    image = Workload((Kind("image", images=((640, 640),)),))
    return evaluate(setup or setup_of(), workload or image, pixels_by_64)
