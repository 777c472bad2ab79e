"""Encoder outputs on disk outlive the engine: after a restart a known image is not encoded again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.request.inputs import to_image
from fovea.engine.vision.encoding import VisualFeatures
from fovea.evaluation.scenes import HELD_OUT_SEED, generate
from tests.support.engines import all_at_once, ask, assert_idle, engine, picture

pytestmark = pytest.mark.kernels


def tiny(folder: Path, **settings: Any) -> Engine:
    return Engine.from_pretrained(
        "fovea-tiny", device="cpu", kv_cache_mib=32, threads=1, embed_disk_dir=str(folder), **settings
    )


def prompt(seed: int = 0) -> ChatPrompt:
    (sample,) = generate(HELD_OUT_SEED + seed, 1, ["describe"])
    return ChatPrompt(
        (Message("user", (ImagePart(to_image(sample.images[0])), TextPart("Describe the image."))),)
    )


def answer(engine: Engine, prompt: ChatPrompt, **settings: Any) -> str:
    return engine.generate(prompt, temperature=0, max_tokens=24, **settings).text


def flush(engine: Engine) -> None:
    assert engine.parts.slower.flush(10)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_after_a_restart_a_known_image_is_not_encoded(tmp_path: Path, dtype: str) -> None:
    with tiny(tmp_path, dtype=dtype) as first:
        expected = answer(first, prompt())
        assert first.stats()["images_encoded"] == 1
        flush(first)
    with tiny(tmp_path, dtype=dtype) as second:
        assert answer(second, prompt()) == expected
        stats = second.stats()
        assert (stats["images_encoded"], stats["embed_disk_hits"]) == (0, 1)
        assert answer(second, prompt(1)) != expected
        assert second.stats()["images_encoded"] == 1


def test_another_type_or_another_salt_is_another_image(tmp_path: Path) -> None:
    with tiny(tmp_path, dtype="float32") as first:
        answer(first, prompt())
        flush(first)
        first.loop.call(first.parts.embeddings.clear)
        answer(first, prompt(), cache_salt="tenant")
        assert first.stats()["images_encoded"] == 2
        flush(first)
    with tiny(tmp_path, dtype="bfloat16") as second:
        answer(second, prompt())
        assert second.stats()["images_encoded"] == 1


def test_damaged_files_cost_time_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tiny(tmp_path) as first:
        expected = answer(first, prompt())
        flush(first)
    for file in tmp_path.rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-5] ^= 0xFF
        file.write_bytes(bytes(data))
    with tiny(tmp_path) as second:
        assert answer(second, prompt()) == expected
        assert second.stats()["images_encoded"] == 1
        assert second.stats()["embed_disk_corrupt"] == 1
    assert "safetensors" in caplog.text


def test_clearing_the_caches_clears_the_disk(tmp_path: Path) -> None:
    with tiny(tmp_path) as engine:
        answer(engine, prompt())
        flush(engine)
        engine.clear_caches()
        assert not list(tmp_path.rglob("*.safetensors"))
        answer(engine, prompt())
        assert engine.stats()["images_encoded"] == 2


def test_an_output_from_disk_is_held_until_it_is_read(tmp_path: Path) -> None:
    """Even if the device's cache has no room, an output from disk must reach the step that needs it."""
    with tiny(tmp_path) as first:
        expected = answer(first, prompt())
        flush(first)
    with tiny(tmp_path, embed_cache_mib=0) as second:
        assert answer(second, prompt()) == expected
        assert second.stats()["images_encoded"] == 0
        second.check_integrity()


def test_an_output_that_does_not_fit_the_plan_is_a_miss(tmp_path: Path) -> None:
    """Such an output made the step that read it fail, with all requests in that step, at every attempt."""
    with tiny(tmp_path) as first:
        expected = answer(first, prompt())
        flush(first)
    with tiny(tmp_path) as second:
        assert second.parts.slower._disk is not None
        disk = second.parts.slower._disk.tier
        get = disk.get

        def short(key: str) -> VisualFeatures | None:
            features = get(key)
            return None if features is None else VisualFeatures(features.embeds[:-1], features.deepstack)

        disk.get = short  # type: ignore[method-assign]
        assert answer(second, prompt()) == expected
        assert second.stats()["failed_steps"] == 0
        assert second.stats()["images_encoded"] == 1


def test_outputs_read_for_waiting_requests_stay_below_the_ceiling(qwen: Path, tmp_path: Path) -> None:
    """When requests arrived, their outputs were copied from disk to device memory without any limit.

    Requests kept them until their last token.
    """
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    prompts = [ask("what?", picture(seed, 256, 256)) for seed in range(8)]
    with engine(qwen, embed_disk_dir=str(tmp_path)) as first:
        expected = [first.generate(prompt, **options).token_ids for prompt in prompts]
        size = int(first.stats()["embed_cache_bytes"]) // len(prompts)
        flush(first)
    with engine(qwen, embed_disk_dir=str(tmp_path), embed_cache_mib=0, max_running=2) as second:
        step, sizes = second.loop._step, [0]

        def recording_step() -> None:
            sizes.append(second.parts.embeddings.bytes)
            step()
            sizes.append(second.parts.embeddings.bytes)

        second.loop._step = recording_step  # type: ignore[method-assign]
        with ThreadPoolExecutor(len(prompts)) as pool, all_at_once(second, len(prompts)):
            answers = [pool.submit(second.generate, prompt, **options) for prompt in prompts]
        assert [answer.result().token_ids for answer in answers] == expected
        assert max(sizes) == size
        assert second.stats()["images_encoded"] == 0
        assert_idle(second)


def test_a_request_drops_outputs_from_disk_after_its_first_token(qwen: Path, tmp_path: Path) -> None:
    question = ask("what?", picture(1))
    with engine(qwen, embed_disk_dir=str(tmp_path)) as machine:
        machine.generate(question, max_tokens=1)
        flush(machine)
        machine.loop.call(machine.parts.embeddings.clear)
        running = machine.iterate(machine.request(question, max_tokens=50, ignore_eos=True))
        next(running)
        assert [job.inputs.features for job in machine.loop.board.jobs.values()] == [{}]
        running.close()
        assert machine.stats()["images_encoded"] == 1
