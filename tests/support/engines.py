"""Real engines over tiny random checkpoints, and random images for their prompts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fovea import Engine
from fovea.core.media import Image, PixelBudget, content_identity
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.config import EngineConfig
from fovea.engine.load import LoadedModel, load_model

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "threads": 1, "kv_blocks": 256, "speculate": "off",
}  # fmt: skip
"""Without speculation, so that steps and their tokens can be counted; `test_speculation.py` has it."""


@cache
def shared_model(folder: Path) -> LoadedModel:
    """Load the weights once per checkpoint; engines with different settings share them."""
    return load_model(str(folder), EngineConfig.of(**SETTINGS))


def engine(folder: Path, **settings: Any) -> Engine:
    return Engine(shared_model(folder), EngineConfig.of(**{**SETTINGS, **settings}))


@cache
def picture(seed: int = 0, width: int = 96, height: int = 64) -> Image:
    rgb = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8).tobytes()
    return Image(content_identity("test", width, height, rgb), width, height, rgb)


def ask(text: str, *images: Image, system: str = "", budget: PixelBudget | None = None) -> ChatPrompt:
    """A prompt of one user turn: images, then the question."""
    parts = [ImagePart(image, budget or PixelBudget()) for image in images]
    head = (Message("system", (TextPart(system),)),) if system else ()
    return ChatPrompt((*head, Message("user", (*parts, TextPart(text)))))


def assert_idle(engine: Engine) -> None:
    """Assert that the engine is idle and holds no resources."""
    engine.check_integrity()
    stats = engine.stats()
    assert stats["kv_blocks_used"] == 0
    assert stats["integrity_errors"] == 0
    assert stats["requests_running"] == stats["requests_waiting"] == 0
    assert engine.unfinished == 0
    assert not engine.runner._prompts


@contextmanager
def all_at_once(machine: Engine, jobs: int) -> Iterator[None]:
    """Stop the loop until `jobs` requests have arrived, so that they meet in one step."""
    gate = threading.Event()
    holder = threading.Thread(target=machine.loop.call, args=(gate.wait,))
    holder.start()

    def open_when_full() -> None:
        while machine.loop._inbox.qsize() < jobs and not gate.wait(0.001):
            pass
        gate.set()

    opener = threading.Thread(target=open_when_full)
    opener.start()
    try:
        yield
    finally:
        gate.set()
        holder.join()
        opener.join()
