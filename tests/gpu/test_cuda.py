"""What changes on CUDA: nothing but the device. Run by `make gpu`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fovea import Engine
from tests.support.checkpoints import ARCHITECTURES, write
from tests.support.reference import Reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_tokens_equal_transformers_on_cpu(architecture: str, tmp_path: Path) -> None:
    """Float32 on the card against float32 on the CPU; TF32 would round differently."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    folder = write(architecture, tmp_path)
    noise = np.random.default_rng(0).integers(0, 255, (90, 130, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    with Engine.from_pretrained(str(folder), dtype="float32", device="cuda", kv_cache_mib=64) as engine:
        request = engine.request("what is it?", [image], temperature=0, max_tokens=64, ignore_eos=True)
        ids = engine._preparer.builder.build(request.prompt).ids
        ours = [
            list(engine.generate(request.prompt, sampling=request.sampling).token_ids[0]) for _ in range(2)
        ]
        engine.check_integrity()
    theirs = Reference(folder).generate(ids, [image], 64)
    assert ours == [theirs, theirs]


def test_eight_at_once_equal_one_by_one(tmp_path: Path) -> None:
    import asyncio

    folder = write("qwen3_vl", tmp_path)
    rng = np.random.default_rng(1)
    images = [Image.fromarray(rng.integers(0, 255, (64 + 32 * i, 96, 3), dtype=np.uint8)) for i in range(8)]
    options = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
    with Engine.from_pretrained(str(folder), dtype="float32", device="cuda", kv_cache_mib=64) as engine:
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
