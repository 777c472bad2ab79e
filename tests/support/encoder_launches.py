"""Counts the launches of an encoder's blocks, and the time of the host that launches them, without a GPU.

    python -m tests.support.encoder_launches

It prints the launches of one block for all architectures whose blocks are computed for several images
together (see `tests.support.launches` for what counts), the number of all other launches for an image, and
the processor time of a tower with the 32 blocks of Qwen2.5-VL's, for 1 and for 16 images. For that time the
blocks are narrow and the images tiny, so that little but the launching is measured.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it at its first import

import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from fovea.core.media import PixelBudget
from fovea.engine.config import EngineConfig
from fovea.engine.layers.linear import Linear, use_kernels
from fovea.engine.load import load_model
from fovea.engine.vision import calls
from fovea.engine.vision.calls import Member, encode_together
from fovea.engine.vision.qwen import QwenVisionConfig, QwenVisionTower
from fovea.kernels.spans import Spans
from fovea.kernels.triton.kernels import TritonKernels
from tests.support.checkpoints import ARCHITECTURES, write
from tests.support.engines import picture
from tests.support.launches import SETTINGS, counting

IMAGES, REPEATS = (1, 16), 5


def encoder_launches(architecture: str, folder: Path) -> tuple[int, int] | None:
    """Return the most launches of a block, and the launches of an image outside of blocks.

    None: the blocks of this architecture are not computed together.
    """
    loaded = load_model(str(write(architecture, folder)), EngineConfig.of(**SETTINGS))
    plan = loaded.processor.plan(96, 64, PixelBudget())
    image = loaded.processor.process(picture(1), plan)
    blocks: list[int] = []

    def counted(*args: Any) -> Tensor:
        before = counter.count
        result = run_block(*args)
        blocks.append(counter.count - before)
        return result

    run_block = calls.run_block
    with (
        torch.inference_mode(),
        mock.patch.object(calls, "run_block", counted),
        mock.patch.object(TritonKernels, "attend_spans", one_launch, create=True),
        counting() as counter,
    ):
        loaded.model.kernels.attend_spans = one_launch  # type: ignore[method-assign]
        for _ in encode_together([Member(loaded.model.encode_slices(image))], merge=True):
            pass
    return (max(blocks), counter.count - sum(blocks)) if blocks else None


def one_launch(qkv: Tensor, spans: Spans, heads: int) -> Tensor:
    """Stand in for FlashAttention: one launch, whose result means nothing."""
    return qkv.new_zeros(len(qkv), heads * qkv.shape[2])


def host_ms(images: int) -> float:
    """Return the milliseconds of the host per image, the least of REPEATS runs."""
    tower = QwenVisionTower(
        QwenVisionConfig(
            generation="2.5", depth=32, hidden=32, heads=4, intermediate=48, out_hidden=32, activation="silu",
            channels=3, patch=2, temporal=2, merge=2, theta=10000.0, window=2, full=(7, 15, 23, 31),
        )
    )  # fmt: skip
    for parameter in tower.parameters():
        parameter.data.zero_()
    kernels = TritonKernels(torch.device("cpu"))
    kernels.attend_spans = one_launch
    for module in tower.modules():
        if isinstance(module, Linear):
            module.pack(kernels)
    use_kernels(tower, kernels)
    patches = torch.zeros(16, 24)
    found = []
    with torch.inference_mode(), mock.patch.object(GridExecutor, "__call__"):
        for _ in range(REPEATS):
            started = time.thread_time()
            members = [Member(tower.slices(patches, (1, 4, 4))) for _ in range(images)]
            for _ in encode_together(members, merge=True):
                pass
            found.append(1000 * (time.thread_time() - started) / images)
    return min(found)


def main() -> None:
    print("| architecture | launches of a block | others of an image |\n|---|---|---|")
    for architecture in sorted(ARCHITECTURES):
        with tempfile.TemporaryDirectory() as folder:
            found = encoder_launches(architecture, Path(folder))
            if found is not None:
                print(f"| {architecture} | {found[0]} | {found[1]} |", flush=True)
    torch.set_num_threads(1)
    for images in IMAGES:
        print(f"processor time of the host, {images} images, 32 blocks: {host_ms(images):.2f} ms per image")


if __name__ == "__main__":
    main()
