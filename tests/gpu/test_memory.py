"""The memory of the GPU is divided at the start, and a step or image that does not fit is tried again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support import gpu
from tests.support.checkpoints import write

pytestmark = gpu.MARKS
PARTS = ["others", "weights", "libraries", "step", "graphs", "outputs", "copies", "headroom", "kv", "spare"]


@gpu.NEEDS_CUDA
def test_the_largest_step_is_measured_and_fits(tmp_path: Path) -> None:
    """Sixteen requests with large images take no more than was measured, and the pool gets the rest."""
    folder = write("qwen2_5_vl", tmp_path)
    rng = np.random.default_rng(5)
    images = [Image.fromarray(rng.integers(0, 255, (448, 448, 3), dtype=np.uint8)) for _ in range(16)]
    with gpu.engine_of(folder, dtype="bfloat16", kv_blocks=0, kv_host_mib=8) as engine:
        stats = engine.stats()
        values = {name: stats[f"memory_{name}_bytes"] for name in PARTS}
        assert sum(values.values()) == stats["memory_total_bytes"]
        assert values["step"] > 0
        assert (values["graphs"] > 0) == (engine.runner._padded is not None)
        assert values["spare"] >= 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda image: engine.generate("what? " * 200, [image], max_tokens=16), images))
        grown = torch.cuda.max_memory_reserved() - before
        assert grown <= values["step"] + values["outputs"] + values["headroom"]
        assert engine.stats()["memory_retries"] == 0
        engine.check_integrity()


def test_answers_stay_the_same_when_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step, steps of many tokens, and the first try of each image need more than any device has."""
    folder = write("qwen2_5_vl", tmp_path)
    rng = np.random.default_rng(6)
    question = "what is it, and where? " * 3
    count, side = gpu.either((6, 112), (2, 56))
    images = [Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8)) for _ in range(count)]
    options: dict[str, Any] = {
        "temperature": 0, "max_tokens": gpu.either(16, 2), "ignore_eos": True,
    }  # fmt: skip
    with gpu.engine_of(folder, dtype="float32", prefix_cache=False) as engine:
        alone = [engine.generate(question, [image], **options).token_ids for image in images]
        engine.clear_caches()
        runner, model, tried = engine.runner, engine.runner.model, set()
        forward, encode, steps = runner._forward, model.encode_slices, []

        def limited(work: Any, rows: Any) -> Any:
            steps.append(sum(item.count for item in work))
            if steps[-1] > 20 or len(steps) == 1:
                torch.empty(1 << 50, dtype=torch.uint8, device=gpu.DEVICE)
            return forward(work, rows)

        def once(image: Any) -> Any:
            if image.identity not in tried:
                tried.add(image.identity)
                torch.empty(1 << 50, dtype=torch.uint8, device=gpu.DEVICE)
            return encode(image)

        monkeypatch.setattr(runner, "_forward", limited)
        monkeypatch.setattr(model, "encode_slices", once)
        with ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(engine.generate, question, [image], **options) for image in images]
            assert [future.result().token_ids for future in futures] == alone
        stats = engine.stats()
        assert stats["memory_retries"] > 0
        # An image that waits while halves of a step are tried may begin again without being alone.
        assert 1 <= stats["memory_image_retries"] <= count
        assert stats["memory_failures"] == stats["failed_steps"] == 0
        engine.check_integrity()
