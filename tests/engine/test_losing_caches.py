"""Any cache may lose anything at any time, and the answers stay the same."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from tests.support.engines import ask, at_rest, engine, picture

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
    """On the engine's thread, between two steps: names of cached blocks, encoder outputs, or all of either."""
    embeddings, pool = machine._embeddings, machine._kv.pool
    kind = rng.random()
    if kind < 0.5 and len(embeddings):
        embeddings.drop(rng.choice(list(embeddings._entries)))
    elif kind < 0.6:
        embeddings.clear()
    elif kind < 0.7:
        pool.forget_all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_blocks": 40, "max_step_tokens": 24}, {"embed_cache_mib": 0, "policy": "fcfs"}],
    ids=["roomy", "tight", "no room for outputs"],
)
def test_entries_vanish_during_a_run(qwen: Path, settings: dict[str, Any], seed: int) -> None:
    with engine(qwen, prefix_cache=False, embed_cache_mib=0, max_running=1) as alone:
        truth = [alone.generate(prompt, **GREEDY).token_ids for prompt in PROMPTS]
    rng = random.Random(seed)
    with engine(qwen, **settings) as machine:
        step = machine.loop._step

        def losing() -> None:
            lose_something(machine, rng)
            step()

        machine.loop._step = losing  # type: ignore[method-assign]
        order = [rng.randrange(len(PROMPTS)) for _ in range(24)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: machine.generate(PROMPTS[i], **GREEDY).token_ids, order))
        assert found == [truth[i] for i in order]
        at_rest(machine)
