"""Encoder outputs outlive the engine: a restart answers about a known image without its encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.inputs import to_image
from fovea.engine.vision.features import VisualFeatures
from fovea.evaluation.scenes import HELD_OUT_SEED, generate


def tiny(folder: Path, **settings: Any) -> Engine:
    return Engine.from_pretrained(
        "fovea-tiny", device="cpu", kv_cache_mib=32, threads=1, embed_disk_dir=str(folder), **settings
    )


def prompt(seed: int = 0) -> ChatPrompt:
    (sample,) = generate(HELD_OUT_SEED + seed, 1, ["describe"])
    return ChatPrompt(
        (Message("user", (ImagePart(to_image(sample.images[0])), TextPart("Describe the image."))),)
    )


def say(engine: Engine, asked: ChatPrompt, **settings: Any) -> str:
    return engine.generate(asked, temperature=0, max_tokens=24, **settings).text


def written(engine: Engine) -> None:
    assert engine._slower.flush(10)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_after_a_restart_a_known_image_is_not_encoded(tmp_path: Path, dtype: str) -> None:
    with tiny(tmp_path, dtype=dtype) as first:
        said = say(first, prompt())
        assert first.stats()["images_encoded"] == 1
        written(first)
    with tiny(tmp_path, dtype=dtype) as second:
        assert say(second, prompt()) == said
        stats = second.stats()
        assert (stats["images_encoded"], stats["embed_disk_hits"]) == (0, 1)
        assert say(second, prompt(1)) != said
        assert second.stats()["images_encoded"] == 1


def test_another_type_or_another_salt_is_another_image(tmp_path: Path) -> None:
    with tiny(tmp_path, dtype="float32") as first:
        say(first, prompt())
        written(first)
        first.loop.call(first._embeddings.clear)
        say(first, prompt(), cache_salt="tenant")
        assert first.stats()["images_encoded"] == 2
        written(first)
    with tiny(tmp_path, dtype="bfloat16") as second:
        say(second, prompt())
        assert second.stats()["images_encoded"] == 1


def test_damaged_files_cost_time_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tiny(tmp_path) as first:
        said = say(first, prompt())
        written(first)
    for file in tmp_path.rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-5] ^= 0xFF
        file.write_bytes(bytes(data))
    with tiny(tmp_path) as second:
        assert say(second, prompt()) == said
        assert second.stats()["images_encoded"] == 1
        assert second.stats()["embed_disk_corrupt"] == 1
    assert "safetensors" in caplog.text


def test_clearing_the_caches_clears_the_disk(tmp_path: Path) -> None:
    with tiny(tmp_path) as engine:
        say(engine, prompt())
        written(engine)
        engine.clear_caches()
        assert not list(tmp_path.rglob("*.safetensors"))
        say(engine, prompt())
        assert engine.stats()["images_encoded"] == 2


def test_what_the_disk_gives_is_held_until_it_is_read(tmp_path: Path) -> None:
    """With no room in memory at all an output from disk must still reach the step that needs it."""
    with tiny(tmp_path) as first:
        said = say(first, prompt())
        written(first)
    with tiny(tmp_path, embed_cache_mib=0) as second:
        assert say(second, prompt()) == said
        assert second.stats()["images_encoded"] == 0
        second.check_integrity()


def test_an_output_that_does_not_fit_the_plan_is_a_miss(tmp_path: Path) -> None:
    """It failed the step that read it, and whoever else was in that step, and again at every try."""
    with tiny(tmp_path) as first:
        said = say(first, prompt())
        written(first)
    with tiny(tmp_path) as second:
        assert second._slower._disk is not None
        disk = second._slower._disk.tier
        get = disk.get

        def short(key: str) -> VisualFeatures | None:
            found = get(key)
            return None if found is None else VisualFeatures(found.embeds[:-1], found.deepstack)

        disk.get = short  # type: ignore[method-assign]
        assert say(second, prompt()) == said
        assert second.stats()["failed_steps"] == 0
        assert second.stats()["images_encoded"] == 1
