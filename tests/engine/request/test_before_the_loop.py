"""Requests between their arrival and their first step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from fovea import Engine
from fovea.core.errors import DeadlineExceeded, InvalidRequest
from fovea.engine.vision.processor.qwen import QwenProcessor
from tests.support.checkpoints import write

OPTIONS = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen3_vl", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(str(folder), dtype="float32", kv_cache_mib=16, threads=1) as engine:
        yield engine


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No image's pixels are computed before the event is set."""
    gate = threading.Event()
    original = QwenProcessor.process

    def process(self: QwenProcessor, *args: object) -> object:
        assert gate.wait(30)
        return original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(QwenProcessor, "process", process)
    yield gate
    gate.set()


async def answer(engine: Engine, images: list[Image.Image], **options: object) -> int:
    count = 0
    async for delta in engine.stream("what?", images, **{**OPTIONS, **options}):
        count += len(delta.token_ids)
    return count


def picture(side: int) -> Image.Image:
    return Image.new("RGB", (side, side), (side % 255, 10, 20))


async def test_text_does_not_wait_for_other_requests_pixels(engine: Engine, stuck: threading.Event) -> None:
    """Once, eight image requests held all preparing threads, and a text request waited three seconds."""
    images = [asyncio.create_task(answer(engine, [picture(64 + 32 * i)])) for i in range(8)]
    await asyncio.sleep(0.05)
    assert await asyncio.wait_for(answer(engine, []), 20) == 4
    assert not any(task.done() for task in images)
    stuck.set()
    assert await asyncio.gather(*images) == [4] * 8
    engine.check_integrity()
    assert engine.stats()["pixel_bytes"] == 0


async def test_a_deadline_runs_while_pixels_are_computed(engine: Engine, stuck: threading.Event) -> None:
    """Once, the timeout began only when a thread took the request, and was checked only after the pixels."""
    with pytest.raises(DeadlineExceeded):
        await answer(engine, [picture(96)], timeout=0.05)
    other = asyncio.create_task(answer(engine, [picture(96)]))
    await asyncio.sleep(0.01)
    stuck.set()
    assert await other == 4
    assert engine.stats()["pixel_bytes"] == 0


async def test_text_does_not_wait_for_room_that_images_wait_for(engine: Engine) -> None:
    """Once, a text request, which reserves nothing, had to queue with the image requests."""
    pool = engine.parts.preparer.pixel_pool
    reservation = pool.reserve([], pool.capacity)
    images = asyncio.create_task(answer(engine, [picture(64)]))
    await asyncio.sleep(0.05)
    assert await asyncio.wait_for(answer(engine, []), 20) == 4
    assert not images.done()
    reservation.release()
    assert await images == 4


def test_a_deadline_runs_in_threads_that_wait_for_room(engine: Engine) -> None:
    """Once, `generate` checked its timeout only when the reservation was granted."""
    pool = engine.parts.preparer.pixel_pool
    reservation = pool.reserve([], pool.capacity)
    with pytest.raises(DeadlineExceeded):
        engine.generate("what?", [picture(96)], timeout=0.05)
    reservation.release()
    assert engine.stats()["pixel_bytes"] == 0
    assert engine.generate("what?", [picture(96)], max_tokens=2)


async def test_leaving_early_does_not_take_the_pixels_from_others(
    engine: Engine, stuck: threading.Event
) -> None:
    first, second = (asyncio.create_task(answer(engine, [picture(128)])) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    stuck.set()
    assert await second == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rotary_frequencies_are_float32_whatever_the_model_is(folder: Path, dtype: str) -> None:
    """Once they were rounded to bf16, an error of 0.4%: nearly half a radian at position 1000."""
    with Engine.from_pretrained(str(folder), dtype=dtype, kv_cache_mib=4, threads=1) as engine:
        config = engine.runner.model.decoder.config
        inverse = engine.runner.model.decoder.rotary[0].inverse
    assert inverse.tolist() == list(config.rotaries[0].inverse)
    assert inverse.dtype is torch.float32


def test_nothing_is_dropped_silently(engine: Engine) -> None:
    request = engine.request("hi", max_tokens=3)
    with pytest.raises(InvalidRequest, match="max_tokens cannot be given together with sampling"):
        engine.generate("hi", sampling=request.sampling, max_tokens=2)
    with pytest.raises(InvalidRequest, match="complete"):
        engine.generate(request, images=[picture(32)])
    with pytest.raises(InvalidRequest, match="images cannot be given with a ChatPrompt"):
        engine.generate(request.prompt, images=[picture(32)])
    assert len(engine.generate(request).token_ids[0]) <= 3
