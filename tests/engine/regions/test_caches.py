"""Tests of the caches with reduced images: what requests share, and the loss of entries during a run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.types import Completion
from fovea.engine.models.qwen_vl import QwenVL
from fovea.engine.request.prompt_plan import process
from fovea.engine.vision.processor.base import ProcessedImage
from fovea.engine.vision.qwen import QwenVisionTower
from tests.engine.test_losing_caches import lose_something
from tests.support.engines import ask, assert_idle, engine, picture
from tests.support.reduced import (
    GREEDY,
    features_of,
    focused_looks,
    patchy_page,
    prepared_prompt,
    reduced_prompt,
)
from tests.support.thorough import is_thorough

Checkpoints = Callable[[str], Path]
Grid = tuple[int, int, int]
SMALL, LARGE = picture(21, 190, 130), patchy_page(22, 440, 640)
MEDIUM = patchy_page(23, 320, 480)
LARGER = patchy_page(22, 600, 880)
"""Large enough for views beside that of the whole, with few tokens or a share of them."""


@pytest.fixture(scope="module", autouse=True)
def looks() -> Iterator[None]:
    with focused_looks():
        yield


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Grid]:
    """The grid of patches of every pass of the tower, since the test cleared the list."""
    grids: list[Grid] = []
    slices = QwenVisionTower.slices

    def record(self: QwenVisionTower, patches: Any, grid: Grid, at: Any = None) -> Any:
        grids.append(grid)
        return slices(self, patches, grid, at)

    monkeypatch.setattr(QwenVisionTower, "slices", record)
    return grids


@pytest.fixture
def machine(checkpoint: Checkpoints) -> Iterator[Engine]:
    with engine(checkpoint("qwen3_vl")) as machine:
        yield machine
        assert_idle(machine)


@pytest.fixture
def bare(checkpoint: Checkpoints) -> Iterator[Engine]:
    """An engine without caches."""
    with engine(checkpoint("qwen3_vl"), prefix_cache=False, embed_cache_mib=0, region_cache_mib=0) as machine:
        yield machine


def generate(machine: Engine, prompt: Any, **settings: Any) -> Completion:
    return machine.generate(prompt, **GREEDY, **settings)


def test_a_second_question_encodes_only_new_views(machine: Engine, bare: Engine, passes: list[Grid]) -> None:
    """The view of the whole, and regions at the resolution of an earlier question, are cache hits.

    The same question again encodes nothing.
    """
    first, second = (
        reduced_prompt(words, LARGER, keep=0.5) for words in ("read the small text", "what colour is it?")
    )
    truth = [generate(bare, prompt).token_ids for prompt in (first, second)]
    passes.clear()
    assert generate(machine, first).token_ids == truth[0]
    views = sum(grid[0] for grid in passes)
    stats = machine.stats()
    assert (stats["region_cache_misses"], stats["region_cache_hits"]) == (views, 0)
    assert stats["region_cache_entries"] <= views
    passes.clear()
    assert generate(machine, second).token_ids == truth[1]
    encoded_views = sum(grid[0] for grid in passes)
    after = machine.stats()
    assert after["region_cache_misses"] == views + encoded_views
    assert after["region_cache_hits"] > 0
    assert encoded_views < views
    machine.clear_caches("kv")
    machine.loop.call(machine.parts.embeddings.clear)
    passes.clear()
    assert generate(machine, second).token_ids == truth[1]
    assert passes == []


def test_without_room_regions_are_encoded_again_and_counted(bare: Engine, passes: list[Grid]) -> None:
    """Before, an empty cache was treated as no cache, and its counters stayed zero."""
    prompt = reduced_prompt("read it", LARGER, budget=100)
    for _ in range(2):
        generate(bare, prompt)
    stats = bare.stats()
    assert stats["region_cache_misses"] == sum(grid[0] for grid in passes) > 0
    assert (stats["region_cache_entries"], stats["region_cache_bytes"]) == (0, 0)


def test_the_ceiling_is_reported_while_the_cache_is_empty(machine: Engine) -> None:
    assert machine.stats()["region_cache_capacity_bytes"] == 64 * 1024**2
    generate(machine, reduced_prompt("read it", LARGER, budget=100))
    assert machine.stats()["region_cache_bytes"] > 0
    machine.clear_caches("regions")
    stats = machine.stats()
    assert (stats["region_cache_bytes"], stats["region_cache_entries"]) == (0, 0)
    assert stats["region_cache_misses"] > 0


def test_the_whole_output_serves_every_method(machine: Engine, bare: Engine, passes: list[Grid]) -> None:
    """One encoder pass serves a plain question, several methods and several shares, in any order."""
    prompts = [
        reduced_prompt("what?", SMALL, method="dart", keep=0.5),
        reduced_prompt("what?", SMALL, method="dpp_query", keep=0.5),
        reduced_prompt("what?", SMALL, method="fastv", keep=0.25),
        reduced_prompt("what?", SMALL, method="tome", budget=5),
        ask("what?", SMALL),
    ]  # fmt: skip
    truth = [generate(bare, prompt).token_ids for prompt in prompts]
    passes.clear()
    for prompt, expected in zip(prompts, truth, strict=True):
        assert generate(machine, prompt).token_ids == expected
    assert len(passes) == 1
    machine.clear_caches()
    passes.clear()
    for prompt, expected in zip(reversed(prompts), reversed(truth), strict=True):
        assert generate(machine, prompt).token_ids == expected
    assert len(passes) == 1


def test_a_question_that_needs_all_of_an_image_shares_its_encoding_with_plain_questions(
    machine: Engine, passes: list[Grid]
) -> None:
    prompts = ask("what is it?", LARGE), reduced_prompt("how many are there?", LARGE, keep=0.5)
    for first, second in (prompts, prompts[::-1]):
        machine.clear_caches()
        passes.clear()
        generate(machine, first)
        assert len(passes) == 1
        generate(machine, second)
        assert len(passes) == 1


def test_questions_and_methods_share_pixels(machine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pixels are processed once for all questions and shares.

    Before, each question processed them again, because the key of the pixels depended on the reduction.
    """
    keys: list[str] = []

    def record(planned: Any, processor: Any) -> ProcessedImage:
        keys.append(planned.pixel_key)
        return process(planned, processor)

    monkeypatch.setattr("fovea.engine.request.pixels.process", record)
    counts = []
    for words in ("read the small text", "where is it?"):
        for keep in (0.5, 0.3):
            prompt = reduced_prompt(words, LARGE, keep=keep)
            (use,) = generate(machine, prompt).images
            counts.append(
                (use.tokens, len(features_of(machine, prepared_prompt(machine, prompt).spans[0]).embeds))
            )
    assert len(keys) == 1
    assert len(set(counts)) == 2
    assert all(reported == features for reported, features in counts)
    for method in ("dart", "dpp", "tome"):
        generate(machine, reduced_prompt("what?", LARGE, method=method, keep=0.5))
    generate(machine, ask("what?", LARGE))
    assert len(keys) == len(set(keys)) == 2, "once for regions, once for the plain image"


def test_an_image_that_is_encoded_for_a_method_counts_as_one_miss(machine: Engine) -> None:
    """The whole output is stored as well as the reduced one. Before, it was counted as another image."""
    generate(machine, reduced_prompt("what?", SMALL, method="dart", keep=0.5))
    stats = machine.stats()
    assert (stats["images_encoded"], stats["embed_cache_misses"], stats["embed_cache_entries"]) == (1, 1, 2)


@pytest.mark.parametrize("method", ["dart", "relevance"])
def test_a_repeated_question_reuses_its_kv(machine: Engine, method: str) -> None:
    prompt = reduced_prompt("what is in the image?", LARGE, method=method, keep=0.5)
    first, second = generate(machine, prompt), generate(machine, prompt)
    assert second.token_ids == first.token_ids
    assert first.usage.cached == 0
    assert second.usage.cached > second.usage.image


def test_questions_share_the_kv_of_methods_that_do_not_use_the_question(
    machine: Engine, bare: Engine
) -> None:
    for method in ("uniform", "dart", "visionzip", "resize"):
        one, two = (
            reduced_prompt(words, MEDIUM, method=method, keep=0.5) for words in ("what?", "how many?")
        )
        generate(machine, one)
        other = generate(machine, two)
        assert other.token_ids == generate(bare, two).token_ids
        assert other.usage.cached > other.usage.image * 0.9, method


def test_questions_do_not_share_the_kv_of_methods_that_use_the_question(
    machine: Engine, bare: Engine
) -> None:
    for method in ("dart_query", "dart_k", "dpp_query", "fastv", "relevance"):
        one, two = (
            reduced_prompt(words, MEDIUM, method=method, keep=0.5) for words in ("what?", "how many are red?")
        )
        generate(machine, one)
        other = generate(machine, two)
        assert other.token_ids == generate(bare, two).token_ids
        assert other.usage.cached < 16, method


def test_ratios_and_methods_do_not_share_kv(machine: Engine, bare: Engine) -> None:
    wishes: list[dict[str, Any]] = [
        {"method": "dart", "budget": 12}, {"method": "dart", "budget": 13}, {"method": "dpp", "budget": 12},
        {"method": "uniform", "budget": 12},
        {"method": "resize", "budget": 12}, {"method": "relevance", "budget": 12},
    ]  # fmt: skip
    for wish in wishes:
        prompt = reduced_prompt("what is it?", SMALL, **wish)
        answer = generate(machine, prompt)
        assert answer.usage.cached < 16, wish
        assert answer.token_ids == generate(bare, prompt).token_ids
    keys = {
        prepared_prompt(machine, reduced_prompt("what is it?", SMALL, **wish)).spans[0].key for wish in wishes
    }
    assert len(keys) == len(wishes)


@pytest.mark.parametrize("method", ["dart", "relevance"])
def test_a_salt_shares_nothing_with_another(machine: Engine, passes: list[Grid], method: str) -> None:
    prompt = reduced_prompt("what is it?", LARGE, method=method, keep=0.5)
    answers, encoded = [], []
    for salt in ("one", "two", "one"):
        passes.clear()
        answers.append(generate(machine, prompt, cache_salt=salt))
        encoded.append(sum(grid[0] for grid in passes))
        if method == "relevance":
            assert answers[-1].images[0].record is not None
    assert encoded[0] == encoded[1] > encoded[2] == 0
    assert [answer.usage.cached > 0 for answer in answers] == [False, False, True]
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids


@pytest.mark.parametrize(
    ("tier", "method"),
    [
        ("host", "relevance"),
        ("disk", "dpp_query"),
        pytest.param("host", "dpp_query", marks=pytest.mark.slow),
        pytest.param("disk", "relevance", marks=pytest.mark.slow),
    ],
)
def test_slower_tiers_keep_the_places_of_tokens(
    checkpoint: Checkpoints, passes: list[Grid], tmp_path: Path, tier: str, method: str
) -> None:
    tier_settings = {"host": {"embed_host_mib": 64}, "disk": {"embed_disk_dir": str(tmp_path)}}[tier]
    prompts = [
        reduced_prompt("read it", SMALL, method=method, keep=0.5),
        reduced_prompt("read it", LARGE, method=method, keep=0.5),
    ]
    none = {"embed_cache_mib": 0, "region_cache_mib": 0, "prefix_cache": False}
    with engine(checkpoint("qwen3_vl"), **none, **tier_settings) as machine:
        first = [generate(machine, prompt).token_ids for prompt in prompts]
        assert machine.parts.slower.flush(10)
        passes.clear()
        assert [generate(machine, prompt).token_ids for prompt in prompts] == first
        assert passes == []
        assert machine.stats()[f"embed_{tier}_hits"] >= 2
        machine.parts.slower.check_integrity()
        assert_idle(machine)


def test_outputs_age_from_when_they_were_encoded(machine: Engine) -> None:
    """A reduced output is as old as the whole output from which it was chosen."""
    prompt = reduced_prompt("what?", SMALL, method="dart", keep=0.5)
    generate(machine, ask("what?", SMALL))
    (plain,) = prepared_prompt(machine, ask("what?", SMALL)).spans
    whole = features_of(machine, plain)
    generate(machine, prompt)
    (span,) = prepared_prompt(machine, prompt).spans
    assert features_of(machine, span).created_at == whole.created_at
    entry = machine.parts.embeddings._ledger.entry(span.key)
    assert entry is not None
    assert entry.created == whole.created_at


MIXED = [
    reduced_prompt("what is it?", SMALL, method="dart", keep=0.5),
    reduced_prompt("what is it?", LARGE, keep=0.5),
    reduced_prompt("read the text", LARGE, budget=80),
    reduced_prompt("again", SMALL, method="dart", keep=0.5),
    ask("all of it", SMALL),
    reduced_prompt("two of them", SMALL, LARGE, method="dpp_query", budget=40),
    ask("text alone"),
]


@cache
def answers_alone(folder: Path) -> list[tuple[tuple[int, ...], ...]]:
    """The answers to MIXED, one at a time, of an engine without caches."""
    with engine(folder, prefix_cache=False, embed_cache_mib=0, region_cache_mib=0, max_running=1) as alone:
        return [generate(alone, prompt).token_ids for prompt in MIXED]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "settings",
    [
        {"region_cache_mib": 1},
        {"kv_blocks": 60, "max_step_tokens": 24, "embed_cache_mib": 0},
        {"embed_cache_mib": 0, "embed_host_mib": 1, "embed_disk_dir": "disk", "prefix_cache": False},
    ],
    ids=["roomy", "tight", "slower tiers only"],
)
def test_entries_are_lost_during_a_run(
    checkpoint: Checkpoints, settings: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    if "embed_disk_dir" in settings:
        settings = {**settings, "embed_disk_dir": str(tmp_path / "disk")}
    folder = checkpoint("qwen3_vl")
    truth = answers_alone(folder)
    rng = random.Random(seed)
    with engine(folder, **settings) as machine:
        step, regions = machine.loop._step, machine.parts.regions
        assert regions is not None

        def step_and_lose() -> None:
            lose_something(machine, rng)
            if rng.random() < 0.2 and len(regions):
                regions._ledger.remove(rng.choice(list(regions._ledger)))
            step()

        machine.loop._step = step_and_lose  # type: ignore[method-assign]
        order = [rng.randrange(len(MIXED)) for _ in range(16 if is_thorough() else 10)]
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda i: generate(machine, MIXED[i]).token_ids, order))
        assert answers == [truth[i] for i in order]
        assert_idle(machine)
        assert machine.parts.slower.flush(10)


def test_concurrent_requests_do_not_affect_each_other(checkpoint: Checkpoints) -> None:
    """Several methods and a plain request use the same image at once."""
    with engine(checkpoint("qwen2_5_vl"), prefix_cache=False, embed_cache_mib=0, max_running=1) as alone:
        truth = [generate(alone, prompt).token_ids for prompt in MIXED]
    with engine(checkpoint("qwen2_5_vl")) as machine, ThreadPoolExecutor(len(MIXED)) as pool:
        assert isinstance(machine.runner.model, QwenVL)
        assert list(pool.map(lambda prompt: generate(machine, prompt).token_ids, MIXED)) == truth
        assert_idle(machine)
