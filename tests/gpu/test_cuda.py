"""Answers on CUDA equal those on the CPU, and do not depend on load or caches. Run by `make gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fovea import Engine
from fovea.core.media import PixelBudget
from fovea.core.types import Completion
from fovea.engine.vision.calls import Member, encode_together
from fovea.engine.vision.encoding import CudaStream, VisualFeatures
from fovea.engine.vision.graphs import BlockGraphs
from tests.support import gpu
from tests.support.checkpoints import ARCHITECTURES, write
from tests.support.engines import picture
from tests.support.reference import Reference

pytestmark = gpu.MARKS
ON_CPU = {"device": "cpu", "kernels": "torch", "kv_cache_mib": 16}
TIE = 1e-3
"""Difference of log-probabilities below which rounding may decide between two tokens."""
LONG_PROMPTS = ("deepseek_ocr2", "idefics3", "smolvlm")
"""Families with hundreds of visual tokens even in a small image, too many for Triton's interpreter."""


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_tokens_equal_those_on_the_cpu_and_transformers(architecture: str, tmp_path: Path) -> None:
    """Float32 on the GPU against float32 on the CPU. TF32 is off, because it rounds differently.

    If transformers cannot be compared with, the test is skipped after Fovea's own answers were compared.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    folder = write(architecture, tmp_path)
    kernels = gpu.either("auto", "torch" if architecture in LONG_PROMPTS else "triton")
    size, tokens = gpu.either(((90, 130), 64), ((30, 60), 2))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8))
    options: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    with Engine.from_pretrained(str(folder), dtype="float32", **ON_CPU) as engine:
        ids = engine.parts.preparer.builder.build(engine.request("what is it?", [image]).prompt).ids
        on_cpu = engine.generate("what is it?", [image], logprobs=True, top_logprobs=5, **options)
    with gpu.engine_of(folder, dtype="float32", kernels=kernels) as engine:
        first, second = (engine.generate("what is it?", [image], **options).token_ids[0] for _ in range(2))
        engine.check_integrity()
    assert second == first
    assert_equal_or_tied(first, on_cpu)
    theirs = Reference(folder).generate(ids, [image], tokens)
    assert_equal_or_tied(theirs, on_cpu)


def assert_equal_or_tied(tokens: Sequence[int], on_cpu: Completion) -> None:
    """Assert that tokens are those of the CPU up to the first place where two are almost equally likely."""
    for token, other in zip(tokens, on_cpu.logprobs[0], strict=True):
        if token != other.id:
            likely = {number: logprob for number, _, logprob in other.top}
            assert likely.get(token, -np.inf) > other.logprob - TIE, (list(tokens), on_cpu.token_ids[0])
            return


def test_eight_requests_at_once_equal_one_by_one(tmp_path: Path) -> None:
    import asyncio

    folder = write("qwen3_vl", tmp_path)
    rng = np.random.default_rng(1)
    heights = [gpu.either(64, 32) + 32 * number for number in range(gpu.either(8, 2))]
    images = [
        Image.fromarray(rng.integers(0, 255, (side, gpu.either(96, 32), 3), dtype=np.uint8))
        for side in heights
    ]
    options = {"temperature": 0, "max_tokens": gpu.either(32, 2), "ignore_eos": True}
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


@gpu.NEEDS_CUDA
@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "qwen3_vl", "llava", "pixtral"])
def test_images_encoded_together_and_from_graphs_equal_each_alone(architecture: str, tmp_path: Path) -> None:
    folder = write(architecture, tmp_path)
    sizes = ((224, 140), (56, 84), (224, 140), (392, 252), (28, 28))
    with gpu.engine_of(folder, dtype="bfloat16", kernels="triton") as engine:
        model, processor = engine.runner.model, engine.parts.preparer.builder.processor
        images = [
            processor.process(picture(seed, *size), processor.plan(*size, PixelBudget()))
            for seed, size in enumerate(sizes)
        ]

        def features(graphs: BlockGraphs | None) -> list[VisualFeatures]:
            members = [Member(model.encode_slices(image)) for image in images]
            for _ in encode_together(members, merge=True, graphs=graphs):
                pass
            torch.cuda.synchronize()
            return [member.result for member in members if member.result is not None]

        stream, graphs = torch.cuda.Stream(), BlockGraphs()
        with torch.inference_mode(), torch.cuda.stream(stream):
            alone = [model.encode(image) for image in images]
            runs = [features(None), *(features(graphs) for _ in range(3))]
        assert graphs.recorded > 0
        for run in runs:
            assert len(run) == len(images)
            for mine, theirs in zip(run, alone, strict=True):
                for one, other in zip(mine.tensors, theirs.tensors, strict=True):
                    assert gpu.relative_error(one, other) < 0.05


def test_steps_launched_before_the_last_tokens_are_known_change_no_answer(tmp_path: Path) -> None:
    """Three streams, greedy and drawn, with steps launched ahead and one by one."""
    folder = write("qwen3_vl", tmp_path)
    options: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.0, "seed": 4, "top_k": 20},
    ]  # fmt: skip
    tokens = gpu.either(120, 3)
    with gpu.engine_of(folder, dtype="float32", prefix_cache=False) as engine:
        assert engine.loop._async is not None or gpu.REHEARSAL
        found = []
        for _ in range(2):
            with ThreadPoolExecutor(3) as pool:
                futures = [
                    pool.submit(engine.generate, "what?", max_tokens=tokens, ignore_eos=True, **each)
                    for each in options
                ]
                found.append([future.result().token_ids[0] for future in futures])
            engine.loop._async = None
        assert found[0] == found[1]
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
        assert engine.parts.slower.flush(30)
        assert [engine.generate("what?", [image], **options).token_ids for image in images] == first
        engine.clear_caches("host")
        assert [engine.generate("what?", [image], **options).token_ids for image in images] == first
        stats = engine.stats()
        assert (stats["images_encoded"], stats["embed_host_hits"], stats["embed_disk_hits"]) == (3, 3, 3)


def test_kv_that_comes_back_from_host_memory_gives_the_same_answers(tmp_path: Path) -> None:
    """The pool holds one conversation at a time, so follow-up questions load the KV of their image."""
    folder = write("qwen2_5_vl", tmp_path)
    rng = np.random.default_rng(4)
    count, shape = gpu.either((3, (112, 168, 3)), (2, (56, 56, 3)))
    images = [Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8)) for _ in range(count)]
    options = {"temperature": 0, "max_tokens": gpu.either(16, 2), "ignore_eos": True}
    turns = [(text, image) for text in ("what?", "why?") for image in images]
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 4, "embed_cache_mib": 0}
    with gpu.engine_of(folder, prefix_cache=False, **settings) as engine:
        first = [engine.generate(text, [image], **options).token_ids for text, image in turns]
        longest = max(
            len(engine.parts.preparer.builder.build(engine.request(text, [image]).prompt).ids)
            for text, image in turns
        )
    blocks = -(-(longest + options["max_tokens"]) // 4) + 1
    with gpu.engine_of(folder, kv_blocks=blocks, kv_host_mib=8, **settings) as engine:
        assert engine.runner.moves.by_streams
        assert [engine.generate(text, [image], **options).token_ids for text, image in turns] == first
        stats = engine.stats()
        assert stats["images_encoded"] == count
        assert stats["kv_host_loads"] > 0
        with ThreadPoolExecutor(6) as pool:
            found = list(
                pool.map(lambda turn: engine.generate(turn[0], [turn[1]], **options).token_ids, turns)
            )
        assert found == first
        engine.check_integrity()
