"""Figures of a GPU: what NVML reports, and how long encoder and projector take by CUDA's own events."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fovea.observe.device import Devices, load_nvml
from tests.support import gpu
from tests.support.checkpoints import write

pytestmark = gpu.MARKS


def test_the_projector_is_measured_within_the_encoder(tmp_path: Path) -> None:
    folder = write("qwen3_vl", tmp_path)
    noise = np.random.default_rng(0).integers(0, 255, (*gpu.either((256, 320), (64, 64)), 3), dtype=np.uint8)
    with gpu.engine_of(folder, dtype="float32") as engine:
        request = engine.request("what is it?", [Image.fromarray(noise)], temperature=0, max_tokens=2)
        engine.generate(request.prompt, sampling=request.sampling)
        stats = engine.stats()
    assert 0 < stats["image_project_seconds_sum"] <= stats["image_encode_seconds_sum"]


@gpu.NEEDS_CUDA
def test_nvml_reports_the_gpu_that_torch_sees() -> None:
    if load_nvml() is None:
        pytest.skip("nvidia-ml-py is not installed, or there is no driver")
    devices = Devices.of_process()
    devices.read()
    families = {family.name: family for family in devices.collect()}
    total = families["fovea:device_memory_total_bytes"].samples
    assert len(total) == torch.cuda.device_count()
    seen = torch.cuda.get_device_properties(0).total_memory
    assert total[0].value == pytest.approx(seen, rel=0.1)
    assert families["fovea:device_energy_joules"].samples
