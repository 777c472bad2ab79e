"""Any cache may lose anything at any time, and the answers stay the same."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from tests.support.engines import ask, assert_idle, engine, picture
from tests.support.thorough import is_thorough

Tokens = tuple[tuple[int, ...], ...]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
PROMPTS = [
    ask(words, *(picture(seed, 96, 64) for seed in seeds))
    for words, seeds in [
        ("one", (1,)),
        ("again", (1,)),
        ("two", (1, 2)),
        ("other", (3,)),
        ("text alone", ()),
        ("three of them", (2, 3, 4)),
    ]
]


def lose_something(machine: Engine, rng: random.Random) -> None:
    """Drop cache entries on the engine's thread, between two steps: block names, encoder outputs, or both."""
    embeddings, pool, slower = machine.parts.embeddings, machine.parts.kv.pool, machine.parts.slower
    kind = rng.random()
    known = [span.key for job in machine.loop.board.jobs.values() for span in job.seq.spans]
    if kind < 0.4 and len(embeddings):
        embeddings.drop(rng.choice(embeddings.keys))
    elif kind < 0.55 and known:
        slower.drop(rng.choice(known))
    elif kind < 0.65:
        embeddings.clear()
    elif kind < 0.7:
        slower.clear(rng.choice(["host", "disk"]))
    elif kind < 0.75:
        machine.parts.preparer.pixel_pool.clear()
    elif kind < 0.85:
        pool.forget_all()
    elif kind < 0.9:
        machine.parts.kv.host.forget_all()
    elif kind < 0.98 and machine.parts.kv.states is not None:
        machine.parts.kv.states.slots.forget_all()
    elif kind < 0.98 and machine.parts.kv.window is not None:
        machine.parts.kv.window.pool.forget_all()


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tight": {"kv_blocks": 40, "max_step_tokens": 24},
    "no room for outputs": {"embed_cache_mib": 0, "policy": "fcfs"},
    "slower tiers alone": {
        "embed_cache_mib": 0, "embed_host_mib": 1, "embed_disk_dir": "disk", "prefix_cache": False,
    },
    "KV in host memory": {"kv_blocks": 24, "kv_host_mib": 1, "embed_cache_mib": 0},
}  # fmt: skip
FEW = {
    "hybrid": ("tight", "KV in host memory"),
    "windowed": ("tight",),
    "crossing": ("tight",),
}
"""The settings that the default tests try with a model. They try all of them with qwen."""
# Models with sliding windows do not keep KV in host memory.
CASES = [
    pytest.param(
        model,
        settings,
        id=f"{model}-{name}",
        marks=[] if name in FEW.get(model, SETTINGS) else pytest.mark.slow,
    )
    for model in ("qwen", "hybrid", "windowed", "crossing")
    for name, settings in SETTINGS.items()
    if model != "windowed" or "kv_host_mib" not in settings
]


@cache
def answers_alone(folder: Path) -> list[Tokens]:
    """The answers of an engine without caches, one at a time."""
    with engine(folder, prefix_cache=False, embed_cache_mib=0, max_running=1) as alone:
        return [alone.generate(prompt, **GREEDY).token_ids for prompt in PROMPTS]


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("folder", "settings"), CASES, indirect=["folder"])
def test_answers_are_the_same_when_entries_are_lost_during_a_run(
    folder: Path, settings: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    if "embed_disk_dir" in settings:
        settings = {**settings, "embed_disk_dir": str(tmp_path / settings["embed_disk_dir"])}
    truth = answers_alone(folder)
    rng = random.Random(seed)
    with engine(folder, **settings) as machine:
        step = machine.loop._step

        def losing() -> None:
            lose_something(machine, rng)
            step()

        machine.loop._step = losing  # type: ignore[method-assign]
        order = [rng.randrange(len(PROMPTS)) for _ in range(24 if is_thorough() else 16)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: machine.generate(PROMPTS[i], **GREEDY).token_ids, order))
        assert found == [truth[i] for i in order]
        assert_idle(machine)
        assert machine.parts.slower.flush(10)
        machine.parts.slower.check_integrity()


def test_a_follow_up_reads_its_image_from_host_memory(qwen: Path) -> None:
    """The pool holds one conversation. The image of the other is in host memory and is not encoded again."""
    with engine(qwen, prefix_cache=False) as plain:
        truth = [plain.generate(prompt, **GREEDY).token_ids for prompt in PROMPTS]
    with engine(qwen, block_size=4, kv_blocks=13, kv_host_mib=1, embed_cache_mib=0) as machine:
        for index in (0, 3, 0, 3, 1):
            assert machine.generate(PROMPTS[index], **GREEDY).token_ids == truth[index]
        stats = machine.stats()
        assert stats["images_encoded"] == 2
        assert stats["kv_host_loads"] > 0
        machine.clear_caches("kv")
        assert machine.stats()["kv_host_blocks"] == 0
        assert_idle(machine)
