"""Answers on CUDA equal those on the CPU, and do not depend on load or caches. Run by `make gpu`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fovea.engine.vision.stream import CudaStream
from tests.support import gpu
from tests.support.checkpoints import ARCHITECTURES, write
from tests.support.reference import Reference

pytestmark = gpu.MARKS
LONG_PROMPTS = ("deepseek_ocr2", "idefics3", "smolvlm")
"""Families with hundreds of visual tokens even in a small image, too many for Triton's interpreter."""


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_tokens_equal_transformers_on_cpu(architecture: str, tmp_path: Path) -> None:
    """Float32 on the GPU against float32 on the CPU. TF32 is off, because it rounds differently."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    folder = write(architecture, tmp_path)
    kernels = gpu.either("auto", "torch" if architecture in LONG_PROMPTS else "triton")
    size, tokens = gpu.either(((90, 130), 64), ((30, 60), 2))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8))
    with gpu.engine_of(folder, dtype="float32", kernels=kernels) as engine:
        request = engine.request("what is it?", [image], temperature=0, max_tokens=tokens, ignore_eos=True)
        ids = engine._preparer.builder.build(request.prompt).ids
        ours = [
            list(engine.generate(request.prompt, sampling=request.sampling).token_ids[0]) for _ in range(2)
        ]
        engine.check_integrity()
    theirs = Reference(folder).generate(ids, [image], tokens)
    assert ours == [theirs, theirs]


def test_eight_requests_at_once_equal_one_by_one(tmp_path: Path) -> None:
    import asyncio

    folder = write("qwen3_vl", tmp_path)
    rng = np.random.default_rng(1)
    heights = [64 + 32 * number for number in range(gpu.either(8, 2))]
    images = [Image.fromarray(rng.integers(0, 255, (side, 96, 3), dtype=np.uint8)) for side in heights]
    options = {"temperature": 0, "max_tokens": gpu.either(32, 3), "ignore_eos": True}
    with gpu.engine_of(folder, dtype="float32") as engine:
        alone = [engine.generate("what?", [image], **options).token_ids[0] for image in images]
        engine.clear_caches()

        async def one(image: Image.Image) -> tuple[int, ...]:
            ids: tuple[int, ...] = ()
            async for delta in engine.stream("what?", [image], **options):
                ids += delta.token_ids
            return ids

        async def all_at_once() -> list[tuple[int, ...]]:
            return list(await asyncio.gather(*(one(image) for image in images)))

        assert asyncio.run(all_at_once()) == alone
        engine.check_integrity()


def test_images_are_encoded_beside_decodes(tmp_path: Path) -> None:
    """Images are encoded in a CUDA stream of their own while another request decodes.

    Both requests answer as they do alone, so nothing is read before it is computed.
    """
    folder = write("qwen2_5_vl", tmp_path)
    rng = np.random.default_rng(2)
    side, count, long = gpu.either(448, 56), gpu.either(6, 2), gpu.either(200, 3)
    images = [Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8)) for _ in range(count)]
    options = {"temperature": 0, "max_tokens": gpu.either(32, 2), "ignore_eos": True}
    with gpu.engine_of(folder, dtype="float32", prefix_cache=False) as engine:
        assert isinstance(engine.runner._encoder._stream, CudaStream)
        alone = [engine.generate("what?", [image], **options).token_ids[0] for image in images]
        text = engine.generate("tell", **{**options, "max_tokens": long}).token_ids[0]
        engine.clear_caches()
        with ThreadPoolExecutor(7) as pool:
            running = pool.submit(engine.generate, "tell", **{**options, "max_tokens": long})
            futures = [pool.submit(engine.generate, "what?", [image], **options) for image in images]
            assert [future.result().token_ids[0] for future in futures] == alone
            assert running.result().token_ids[0] == text
        engine.check_integrity()


def test_slower_tiers_return_encoder_outputs_that_the_gpu_evicted(tmp_path: Path) -> None:
    folder = write("qwen3_vl", tmp_path)
    rng = np.random.default_rng(3)
    images = [Image.fromarray(rng.integers(0, 255, (96, 128, 3), dtype=np.uint8)) for _ in range(3)]
    options = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    settings: dict[str, Any] = {"dtype": "bfloat16", "prefix_cache": False}
    with gpu.engine_of(
        folder, embed_cache_mib=0, embed_host_mib=16, embed_disk_dir=str(tmp_path / "disk"), **settings
    ) as engine:
        first = [engine.generate("what?", [image], **options).token_ids for image in images]
        assert engine._slower.flush(30)
        assert [engine.generate("what?", [image], **options).token_ids for image in images] == first
        engine.clear_caches("host")
        assert [engine.generate("what?", [image], **options).token_ids for image in images] == first
        stats = engine.stats()
        assert (stats["images_encoded"], stats["embed_host_hits"], stats["embed_disk_hits"]) == (3, 3, 3)
