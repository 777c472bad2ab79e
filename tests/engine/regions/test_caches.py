"""What requests for fewer tokens share with each other, what they do not, and that losing any of it changes no answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from tests.support.reduced import GREEDY, features_of, patchy_page, prepared_prompt, reduced_prompt

Checkpoints = Callable[[str], Path]
Grid = tuple[int, int, int]
SMALL, LARGE = picture(21, 190, 130), patchy_page(22, 700, 1000)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Grid]:
    """Grids of patches of the tower's passes, since they were last looked at."""
    made: list[Grid] = []
    slices = QwenVisionTower.slices

    def noting(self: QwenVisionTower, patches: Any, grid: Grid, at: Any = None) -> Any:
        made.append(grid)
        return slices(self, patches, grid, at)

    monkeypatch.setattr(QwenVisionTower, "slices", noting)
    return made


@pytest.fixture
def machine(checkpoint: Checkpoints) -> Iterator[Engine]:
    with engine(checkpoint("qwen3_vl")) as made:
        yield made
        assert_idle(made)


@pytest.fixture
def bare(checkpoint: Checkpoints) -> Iterator[Engine]:
    """Keeps nothing."""
    with engine(checkpoint("qwen3_vl"), prefix_cache=False, embed_cache_mib=0, region_cache_mib=0) as made:
        yield made


def say(machine: Engine, prompt: Any, **settings: Any) -> Completion:
    return machine.generate(prompt, **GREEDY, **settings)


def test_a_second_question_encodes_what_rose(machine: Engine, bare: Engine, passes: list[Grid]) -> None:
    """The whole at low resolution and regions at a level of before are found; the same question encodes nothing at all."""
    first, second = (
        reduced_prompt(words, LARGE, keep=0.5) for words in ("read the small text", "what colour is it?")
    )
    truth = [say(bare, prompt).token_ids for prompt in (first, second)]
    passes.clear()
    assert say(machine, first).token_ids == truth[0]
    views = sum(grid[0] for grid in passes)
    stats = machine.stats()
    assert (stats["region_cache_misses"], stats["region_cache_hits"]) == (views, 0)
    assert stats["region_cache_entries"] <= views
    passes.clear()
    assert say(machine, second).token_ids == truth[1]
    rose = sum(grid[0] for grid in passes)
    after = machine.stats()
    assert after["region_cache_misses"] == views + rose
    assert after["region_cache_hits"] > 0
    assert rose < views
    machine.clear_caches("kv")
    machine.loop.call(machine._embeddings.clear)
    passes.clear()
    assert say(machine, second).token_ids == truth[1]
    assert passes == []


def test_without_room_regions_are_encoded_anew_and_counted(bare: Engine, passes: list[Grid]) -> None:
    """An empty cache was taken for none at all, and its counts read zero."""
    prompt = reduced_prompt("read it", LARGE, budget=100)
    for _ in range(2):
        say(bare, prompt)
    stats = bare.stats()
    assert stats["region_cache_misses"] == sum(grid[0] for grid in passes) > 0
    assert (stats["region_cache_entries"], stats["region_cache_bytes"]) == (0, 0)


def test_the_ceiling_is_shown_while_nothing_is_kept(machine: Engine) -> None:
    assert machine.stats()["region_cache_capacity_bytes"] == 64 * 1024**2
    say(machine, reduced_prompt("read it", LARGE, budget=100))
    assert machine.stats()["region_cache_bytes"] > 0
    machine.clear_caches("regions")
    stats = machine.stats()
    assert (stats["region_cache_bytes"], stats["region_cache_entries"]) == (0, 0)
    assert stats["region_cache_misses"] > 0


def test_the_whole_output_serves_every_method_after_it(
    machine: Engine, bare: Engine, passes: list[Grid]
) -> None:
    """Whichever came first: a plain question, a method, another one, another share."""
    prompts = [
        reduced_prompt("what?", SMALL, method="dart", keep=0.5), reduced_prompt("what?", SMALL, method="dpp_query", keep=0.5),
        reduced_prompt("what?", SMALL, method="fastv", keep=0.25), reduced_prompt("what?", SMALL, method="tome", budget=5),
        ask("what?", SMALL),
    ]  # fmt: skip
    truth = [say(bare, prompt).token_ids for prompt in prompts]
    passes.clear()
    for prompt, expected in zip(prompts, truth, strict=True):
        assert say(machine, prompt).token_ids == expected
    assert len(passes) == 1
    machine.clear_caches()
    passes.clear()
    for prompt, expected in zip(reversed(prompts), reversed(truth), strict=True):
        assert say(machine, prompt).token_ids == expected
    assert len(passes) == 1


def test_what_is_asked_about_all_of_an_image_shares_its_encoding_with_plain_questions(
    machine: Engine, passes: list[Grid]
) -> None:
    prompts = ask("what is it?", LARGE), reduced_prompt("how many are there?", LARGE, keep=0.5)
    for first, second in (prompts, prompts[::-1]):
        machine.clear_caches()
        passes.clear()
        say(machine, first)
        assert len(passes) == 1
        say(machine, second)
        assert len(passes) == 1


def test_questions_and_methods_share_pixels(machine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question about an image looked at all of its pixels again: they were kept under what was to become of them."""
    made: list[str] = []

    def noting(planned: Any, processor: Any) -> ProcessedImage:
        made.append(planned.pixels)
        return process(planned, processor)

    monkeypatch.setattr("fovea.engine.request.pixels.process", noting)
    kept = []
    for words in ("read the small text", "where is it?"):
        for keep in (0.5, 0.3):
            prompt = reduced_prompt(words, LARGE, keep=keep)
            (seen,) = say(machine, prompt).images
            kept.append(
                (seen.tokens, len(features_of(machine, prepared_prompt(machine, prompt).spans[0]).embeds))
            )
    assert len(made) == 1
    assert len(set(kept)) == 2
    assert all(told == there for told, there in kept)
    for method in ("dart", "dpp", "tome"):
        say(machine, reduced_prompt("what?", LARGE, method=method, keep=0.5))
    say(machine, ask("what?", LARGE))
    assert len(made) == len(set(made)) == 2, "one in parts, one plain"


def test_an_image_that_was_encoded_for_a_method_is_missed_once(machine: Engine) -> None:
    """The whole output is kept beside what was made of it, and was counted as another image."""
    say(machine, reduced_prompt("what?", SMALL, method="dart", keep=0.5))
    stats = machine.stats()
    assert (stats["images_encoded"], stats["embed_cache_misses"], stats["embed_cache_entries"]) == (1, 1, 2)


@pytest.mark.parametrize("method", ["dart", "relevance"])
def test_the_same_question_twice_finds_its_kv(machine: Engine, method: str) -> None:
    prompt = reduced_prompt("what is in the image?", LARGE, method=method, keep=0.5)
    first, second = say(machine, prompt), say(machine, prompt)
    assert second.token_ids == first.token_ids
    assert first.usage.cached == 0
    assert second.usage.cached > second.usage.image


def test_questions_share_the_kv_of_methods_that_do_not_read_them(machine: Engine, bare: Engine) -> None:
    for method in ("uniform", "dart", "visionzip", "resize"):
        one, two = (reduced_prompt(words, LARGE, method=method, keep=0.5) for words in ("what?", "how many?"))
        say(machine, one)
        other = say(machine, two)
        assert other.token_ids == say(bare, two).token_ids
        assert other.usage.cached > other.usage.image * 0.9, method


def test_questions_do_not_share_the_kv_of_methods_that_do(machine: Engine, bare: Engine) -> None:
    for method in ("dart_query", "dart_k", "dpp_query", "fastv", "relevance"):
        one, two = (
            reduced_prompt(words, LARGE, method=method, keep=0.5) for words in ("what?", "how many are red?")
        )
        say(machine, one)
        other = say(machine, two)
        assert other.token_ids == say(bare, two).token_ids
        assert other.usage.cached < 16, method


def test_ratios_and_methods_do_not_share_kv(machine: Engine, bare: Engine) -> None:
    wishes: list[dict[str, Any]] = [
        {"method": "dart", "budget": 12}, {"method": "dart", "budget": 13}, {"method": "dpp", "budget": 12},
        {"method": "uniform", "budget": 12}, {"method": "resize", "budget": 12}, {"method": "relevance", "budget": 12},
    ]  # fmt: skip
    for wish in wishes:
        prompt = reduced_prompt("what is it?", SMALL, **wish)
        found = say(machine, prompt)
        assert found.usage.cached < 16, wish
        assert found.token_ids == say(bare, prompt).token_ids
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
        answers.append(say(machine, prompt, cache_salt=salt))
        encoded.append(sum(grid[0] for grid in passes))
        if method == "relevance":
            assert answers[-1].images[0].record is not None
    assert encoded[0] == encoded[1] > encoded[2] == 0
    assert [answer.usage.cached > 0 for answer in answers] == [False, False, True]
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("method", ["dpp_query", "relevance"])
def test_places_come_back_from_slower_tiers(
    checkpoint: Checkpoints, passes: list[Grid], tmp_path: Path, tier: str, method: str
) -> None:
    chosen = {"host": {"embed_host_mib": 64}, "disk": {"embed_disk_dir": str(tmp_path)}}[tier]
    prompts = [
        reduced_prompt("read it", SMALL, method=method, keep=0.5),
        reduced_prompt("read it", LARGE, method=method, keep=0.5),
    ]
    none = {"embed_cache_mib": 0, "region_cache_mib": 0, "prefix_cache": False}
    with engine(checkpoint("qwen3_vl"), **none, **chosen) as machine:
        first = [say(machine, prompt).token_ids for prompt in prompts]
        assert machine._slower.flush(10)
        passes.clear()
        assert [say(machine, prompt).token_ids for prompt in prompts] == first
        assert passes == []
        assert machine.stats()[f"embed_{tier}_hits"] >= 2
        machine._slower.check_integrity()
        assert_idle(machine)


def test_outputs_age_from_when_they_were_encoded(machine: Engine) -> None:
    """A method chose among tokens of an hour ago: what it kept is an hour old, too."""
    prompt = reduced_prompt("what?", SMALL, method="dart", keep=0.5)
    say(machine, ask("what?", SMALL))
    (plain,) = prepared_prompt(machine, ask("what?", SMALL)).spans
    whole = features_of(machine, plain)
    say(machine, prompt)
    (span,) = prepared_prompt(machine, prompt).spans
    assert features_of(machine, span).created_at == whole.created_at
    entry = machine._embeddings._ledger.entry(span.key)
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


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "settings",
    [
        {"region_cache_mib": 1},
        {"kv_blocks": 60, "max_step_tokens": 24, "embed_cache_mib": 0},
        {"embed_cache_mib": 0, "embed_host_mib": 1, "embed_disk_dir": "disk", "prefix_cache": False},
    ],
    ids=["roomy", "tight", "slower tiers alone"],
)
def test_entries_vanish_during_a_run(
    checkpoint: Checkpoints, settings: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    if "embed_disk_dir" in settings:
        settings = {**settings, "embed_disk_dir": str(tmp_path / "disk")}
    folder = checkpoint("qwen3_vl")
    with engine(folder, prefix_cache=False, embed_cache_mib=0, region_cache_mib=0, max_running=1) as alone:
        truth = [say(alone, prompt).token_ids for prompt in MIXED]
    rng = random.Random(seed)
    with engine(folder, **settings) as machine:
        step, regions = machine.loop._step, machine._regions
        assert regions is not None

        def losing() -> None:
            lose_something(machine, rng)
            if rng.random() < 0.2 and len(regions):
                regions._ledger.remove(rng.choice(list(regions._ledger)))
            step()

        machine.loop._step = losing  # type: ignore[method-assign]
        order = [rng.randrange(len(MIXED)) for _ in range(16)]
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda i: say(machine, MIXED[i]).token_ids, order))
        assert found == [truth[i] for i in order]
        assert_idle(machine)
        assert machine._slower.flush(10)


def test_requests_in_flight_together_do_not_see_each_other(checkpoint: Checkpoints) -> None:
    """Different methods on one image at once, while its whole output is asked for, too."""
    with engine(checkpoint("qwen2_5_vl"), prefix_cache=False, embed_cache_mib=0, max_running=1) as alone:
        truth = [say(alone, prompt).token_ids for prompt in MIXED]
    with engine(checkpoint("qwen2_5_vl")) as machine, ThreadPoolExecutor(len(MIXED)) as pool:
        assert isinstance(machine.runner.model, QwenVL)
        assert list(pool.map(lambda prompt: say(machine, prompt).token_ids, MIXED)) == truth
        assert_idle(machine)
