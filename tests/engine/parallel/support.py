"""Engines of several processes over tiny checkpoints, and questions for them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fovea import Engine
from fovea.core.types import ChatPrompt
from fovea.engine.parallel.driver import DriverGroup
from tests.support.engines import SETTINGS, all_at_once, ask, picture

PROMPTS: dict[str, ChatPrompt] = {
    "text": ask("the red circle is left of the blue square"),
    "picture": ask("What is in the image?", picture(1)),
    "again": ask("Describe the picture, please.", picture(1)),
    "two": ask("compare", picture(1), picture(3, 64, 128)),
}
LONG = ask("the red circle is left of the blue square and what is above this one " * 6)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
Tokens = tuple[int, ...]


def start(folder: Path, tensor: int = 2, pipeline: int = 1, **settings: Any) -> Engine:
    """Start an engine of so many processes."""
    grid = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "parallel_timeout_s": 60}
    return Engine.from_pretrained(str(folder), **{**SETTINGS, **grid, **settings})


def group_of(machine: Engine) -> DriverGroup:
    """The processes of an engine."""
    ranks = machine.runner.model.ranks
    assert isinstance(ranks, DriverGroup)
    return ranks


def one(machine: Engine, prompt: ChatPrompt, **params: Any) -> Tokens:
    return machine.generate(prompt, **{**GREEDY, **params}).token_ids[0]


def together(machine: Engine, names: Sequence[str], **params: Any) -> list[Tokens]:
    """Answer prompts that arrive at the same time."""
    with ThreadPoolExecutor(len(names)) as pool, all_at_once(machine, len(names)):
        return list(pool.map(lambda name: one(machine, PROMPTS[name], **params), names))
