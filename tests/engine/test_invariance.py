"""A schedule never changes an answer: batched or alone, chunked or whole, cold or cached, preempted or not.

Answers are greedy, in float32. Settings change what is computed when, but they may not change a token.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from fovea import Engine
from fovea.core.types import ChatPrompt, Completion, GenerationRequest
from tests.support.engines import all_at_once, ask, assert_idle, engine, picture
from tests.support.thorough import is_thorough, others_slow

TOKENS = 10
PROMPTS: dict[str, ChatPrompt] = {
    "text": ask("the red circle is left of the blue square"),
    "picture": ask("What is in the image?", picture(1)),
    "again": ask("Describe the picture, please.", picture(1)),
    "other": ask("What is in the image?", picture(2)),
    "two": ask("compare", picture(1), picture(3, 64, 128)),
    "twice": ask("the same?", picture(2), picture(2)),
    "large": ask("and here?", picture(4, 224, 192)),
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
Answers = dict[str, tuple[int, ...]]


def one(machine: Engine, name: str, **params: Any) -> tuple[int, ...]:
    return machine.generate(PROMPTS[name], **{**GREEDY, **params}).token_ids[0]


def together(machine: Engine, names: Sequence[str]) -> list[tuple[int, ...]]:
    with ThreadPoolExecutor(len(names)) as pool, all_at_once(machine, len(names)):
        return list(pool.map(lambda name: one(machine, name), names))


FOLDERS = ("qwen", "tiled", "hybrid", "windowed", "crossing")
two_models = pytest.mark.parametrize(
    "folder",
    others_slow(FOLDERS, ("qwen", "hybrid")),
    indirect=True,
)
"""The default tests try what depends on caches with attention, and with states that checkpoints restore."""


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def truth(folder: Path) -> Answers:
    """Return the answers to each prompt alone, in one chunk, on an engine without caches."""
    found = {}
    with engine(folder, prefix_cache=False, embed_cache_mib=0, max_running=1) as machine:
        for name in PROMPTS:
            found[name] = one(machine, name)
        assert_idle(machine)
    assert len(set(found.values())) == len(PROMPTS), (
        "the checkpoint answers everything alike: it would hide mistakes"
    )
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "chunks that end inside images": {"max_step_tokens": 7},
    "one token per step": {"max_step_tokens": 1, "max_running": 3},
    "one image per step": {"max_step_visual_tokens": 1},
    "blocks of one token": {"block_size": 1, "kv_blocks": 4096},
    "blocks of five tokens": {"block_size": 5, "kv_blocks": 512},
    "no prefix cache": {"prefix_cache": False},
    "no encoder-output cache": {"embed_cache_mib": 0},
    "neither, in chunks": {"prefix_cache": False, "embed_cache_mib": 0, "max_step_tokens": 11},
}

STATES: dict[str, dict[str, Any]] = {
    "no checkpoints but at ends": {"state_spacing": 0},
    "few states, many checkpoints": {"state_cache_mib": 1, "state_spacing": 4, "max_step_tokens": 7},
}
"""Settings of the states of recurrent layers, which only one of the models has."""


FEW = ("chunks that end inside images",)
"""The settings that the default tests try with every model. They try the others with the first model."""
ELSEWHERE = ("blocks of five tokens", "no prefix cache", "no encoder-output cache")
"""Settings that the default tests leave out. Others, also of test_losing_caches, are nearly the same."""
CASES = [
    pytest.param(
        model,
        config,
        id=f"{model}-{name}",
        marks=[] if name in FEW or (model == "qwen" and name not in ELSEWHERE) else pytest.mark.slow,
    )
    for model in FOLDERS
    for name, config in SETTINGS.items()
]


@pytest.mark.parametrize(("folder", "config"), CASES, indirect=["folder"])
def test_answers_in_batches_and_repeated_under_any_setting(
    folder: Path, truth: Answers, config: dict[str, Any]
) -> None:
    names = [*PROMPTS, *reversed(PROMPTS)]
    with engine(folder, **config) as machine:
        for asked in (names, [*PROMPTS]):
            assert together(machine, asked) == [truth[name] for name in asked]
        assert_idle(machine)


@pytest.mark.parametrize(
    "folder",
    others_slow(FOLDERS, ("hybrid",)),
    indirect=True,
)
@pytest.mark.parametrize("config", STATES.values(), ids=STATES.keys())
def test_answers_under_any_setting_of_states(folder: Path, truth: Answers, config: dict[str, Any]) -> None:
    test_answers_in_batches_and_repeated_under_any_setting(folder, truth, config)


def test_answers_after_preemption(folder: Path, truth: Answers) -> None:
    """A pool that holds two prompts but not their answers."""
    names = ["picture", "other", "again"] * 3
    with engine(folder, **tight(folder, names)) as machine:
        assert together(machine, names) == [truth[name] for name in names]
        assert machine.stats()["preemptions"] > 0, "the pool was too large for a preemption"
        assert_idle(machine)


def tight(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Settings of a pool for two of these prompts. Layers with a window need room for a whole step in it."""
    return {"block_size": 4, "kv_blocks": blocks_for(folder, names), "max_step_tokens": 64}


def blocks_for(folder: Path, names: Sequence[str]) -> int:
    """Blocks of four tokens for two of the longest of these prompts and a little more."""
    with engine(folder) as machine:
        return max(len(asyncio.run(machine.tokenize(PROMPTS[name]))) for name in names) // 2 + 2


@two_models
def test_answers_from_cold_and_filled_caches(folder: Path, truth: Answers) -> None:
    with engine(folder) as machine:
        assert one(machine, "picture") == truth["picture"]
        before = machine.stats()
        again = machine.generate(PROMPTS["picture"], **GREEDY)
        assert again.token_ids[0] == truth["picture"]
        assert again.usage.cached > 0
        assert machine.stats()["images_encoded"] == before["images_encoded"] == 1
        assert one(machine, "again") == truth["again"]
        assert machine.stats()["images_encoded"] == 1, "a cached image was encoded again"


@two_models
def test_caches_cleared_at_any_moment(folder: Path, truth: Answers) -> None:
    rng = random.Random(5)
    names = [rng.choice(list(PROMPTS)) for _ in range(16 if is_thorough() else 10)]
    with engine(folder, max_step_tokens=9) as machine, ThreadPoolExecutor(4) as pool:
        running = [pool.submit(one, machine, name) for name in names]
        for future in running:
            machine.clear_caches()
            future.exception()
        assert [future.result() for future in running] == [truth[name] for name in names]
        assert_idle(machine)


@two_models
def test_two_images_share_nothing_and_one_image_from_two_sources_is_shared(
    folder: Path, truth: Answers
) -> None:
    with engine(folder) as machine:
        assert one(machine, "picture") == truth["picture"]
        other = machine.generate(PROMPTS["other"], **GREEDY)
        assert other.token_ids[0] == truth["other"]
        assert machine.stats()["images_encoded"] == 2
        shared = other.usage.cached
        copy = picture(1)
        same = type(copy)(copy.identity, copy.width, copy.height, bytes(bytearray(copy.rgb)))
        again = machine.generate(ask("What is in the image?", same), **GREEDY)
        assert again.token_ids[0] == truth["picture"]
        assert machine.stats()["images_encoded"] == 2
        assert again.usage.cached > shared
        assert shared < again.usage.image, "the prefix that two images share extends into the image"


@two_models
def test_salts_share_nothing(folder: Path, truth: Answers) -> None:
    with engine(folder) as machine:
        for salt in ("a", "b", "a"):
            request = GenerationRequest(salt, PROMPTS["picture"], machine.sampling(GREEDY), cache_salt=salt)
            deltas = list(machine.iterate(request))
            assert tuple(i for delta in deltas for i in delta.token_ids) == truth["picture"]
            usage = deltas[-1].usage
            assert usage is not None
            seen = machine.stats()["images_encoded"]
            assert (usage.cached, seen) == {"a": (usage.cached, seen), "b": (0, 2)}[salt]
        assert usage.cached > 0
        assert seen == 2


async def drink(machine: Engine, name: str, sips: int | None = None) -> tuple[int, ...]:
    """Return an answer through `stream`; after `sips` deltas the iterator is closed."""
    ids: list[int] = []
    stream = machine.stream(PROMPTS[name], **GREEDY)
    async for delta in stream:
        ids += delta.token_ids
        if sips is not None and len(ids) >= sips:
            await stream.aclose()  # type: ignore[attr-defined]
            break
    return tuple(ids)


async def rest(machine: Engine) -> None:
    """Wait until the loop's thread has carried out the cancellations in its inbox."""
    while machine.unfinished:
        await asyncio.sleep(0.001)
    assert_idle(machine)


PLAN = st.lists(
    st.tuples(st.sampled_from(sorted(PROMPTS)), st.one_of(st.none(), st.integers(0, TOKENS - 1))),
    min_size=1,
    max_size=8,
)


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[Engine]:
    blocks = blocks_for(folder, list(PROMPTS))
    with engine(
        folder, block_size=4, kv_blocks=blocks, max_step_tokens=13, max_running=6, embed_cache_mib=0
    ) as machine:
        yield machine


@pytest.mark.parametrize("folder", others_slow(FOLDERS, [n for n in FOLDERS if n != "tiled"]), indirect=True)
@settings(
    max_examples=settings.default.max_examples // 6 if is_thorough() else 4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(plan=PLAN)
def test_answers_beside_cancelled_requests_in_a_small_pool(
    small: Engine, truth: Answers, plan: list[tuple[str, int | None]]
) -> None:
    """Random arrivals and cancellations in a pool for two prompts. Remaining requests get the same text."""

    async def crowd() -> list[tuple[int, ...]]:
        answers = await asyncio.gather(*(drink(small, name, sips) for name, sips in plan))
        await rest(small)
        return answers

    for (name, sips), ids in zip(plan, asyncio.run(crowd()), strict=True):
        expected = truth[name] if sips is None else truth[name][: max(1, sips)]
        assert ids == expected


@two_models
def test_choices_share_one_prompt_and_are_equal_when_greedy(folder: Path, truth: Answers) -> None:
    with engine(folder) as machine:
        answer: Completion = machine.generate(PROMPTS["picture"], **GREEDY, n=3)
        assert answer.token_ids == (truth["picture"],) * 3
        assert answer.usage.completion == 3 * TOKENS
        assert machine.stats()["images_encoded"] == 1
        assert_idle(machine)


@two_models
def test_a_seed_gives_the_same_text_in_every_batch(folder: Path) -> None:
    params: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 11}
    names = ["picture", "other", "again"] * 3
    with engine(folder, **tight(folder, names)) as machine:
        alone = machine.generate(PROMPTS["picture"], **params, n=2).token_ids
        assert alone[0] != alone[1]
        with ThreadPoolExecutor(len(names) + 1) as pool, all_at_once(machine, len(names) + 1):
            noise = [pool.submit(one, machine, name, temperature=1.0) for name in names]
            crowded = pool.submit(machine.generate, PROMPTS["picture"], **params, n=2).result().token_ids
            lengths = {len(future.result()) for future in noise}
        assert crowded == alone
        assert lengths == {TOKENS}
        assert machine.generate(PROMPTS["picture"], **{**params, "seed": 12}).token_ids[0] != alone[0]
        assert machine.stats()["preemptions"] > 0
        assert_idle(machine)
