"""A drafter that fails ends speculation: it is logged once, and no answer changes, now or later."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.engine.execute.layer_drafter import LayerDrafter
from fovea.engine.execute.model_drafter import ModelDrafter
from tests.support.draft_layers import computed, draft_always, eagle3
from tests.support.engines import all_at_once, ask, assert_idle, engine, picture

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PROMPTS = [
    ask("What is in the image?", picture(1)),
    ask("Describe the picture, please.", picture(1)),
    ask("compare"),
    ask("the same?", picture(2), picture(2)),
]
Ids = tuple[int, ...]


@pytest.fixture(scope="module")
def answers(qwen: Path) -> list[Ids]:
    with engine(qwen) as machine:
        return together(machine)


@pytest.fixture(scope="module")
def layer(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = eagle3(qwen, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    return files.write(tmp_path_factory.mktemp("layer"))


def together(machine: Engine) -> list[Ids]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool, all_at_once(machine, len(PROMPTS)):
        return list(pool.map(lambda prompt: machine.generate(prompt, **GREEDY).token_ids[0], PROMPTS))


def at_call(number: int, work: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that fails in one call, and later ones."""
    calls = 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= number:
            raise RuntimeError("out of luck")
        return work(*args, **options)

    return failing


POINTS = [
    ("layer", "add", 1),
    ("layer", "note", 2),
    ("layer", "move", 1),
    ("layer", "draft", 1),
    ("layer", "draft", 4),
    ("layer", "_compute", 6),
    ("layer", "remove", 1),
    ("model", "add", 2),
    ("model", "draft", 3),
    ("model", "_compute", 5),
    ("model", "_hold_pixels", 1),
    ("model", "_image", 1),
    ("model", "remove", 1),
]


@pytest.mark.parametrize(("name", "point", "call"), POINTS)
def test_a_drafter_that_fails_ends_speculation(
    name: str,
    point: str,
    call: int,
    qwen: Path,
    layer: Path,
    answers: list[Ids],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = {"draft_layer": str(layer), "draft_model": str(qwen), "speculate": name}
    with engine(qwen, speculative_tokens=3, **settings) as machine:
        draft_always(machine, monkeypatch)
        drafter = computed(machine)
        assert isinstance(drafter, LayerDrafter | ModelDrafter)
        if isinstance(drafter, ModelDrafter):
            monkeypatch.setattr(drafter, "_choose", lambda: 4)
        monkeypatch.setattr(drafter, point, at_call(call, getattr(drafter, point)))
        for _ in range(3):
            assert together(machine) == answers
        drafted = machine.stats()["draft_tokens"]
        assert together(machine) == answers
        assert machine.stats()["draft_tokens"] == drafted
        assert_idle(machine)
    lines = [each for each in caplog.records if "drafts failed" in each.getMessage()]
    assert len(lines) == 1
    assert "out of luck" in caplog.text
