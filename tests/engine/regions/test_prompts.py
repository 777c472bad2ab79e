"""Tests of reduced images in prompts, on real decoders: numbers of tokens, and their positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea import Engine
from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.media import Image
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart, VideoPart
from fovea.engine.request.inputs import to_video
from fovea.engine.request.prompt_plan import PreparedPrompt
from fovea.engine.schedule.plan import Budget
from fovea.engine.sequence import Sequence
from fovea.engine.vision.encoding import VisualFeatures
from fovea.engine.visual_budget.methods import METHODS, PRESETS
from fovea.relevance.balancing import Tensions
from tests.support.clips import clip
from tests.support.engines import all_at_once, ask, assert_idle, engine, picture
from tests.support.pixels import in_time
from tests.support.reduced import (
    ANY_SIZE,
    GREEDY,
    Decoder,
    assert_greedy,
    features_of,
    grid_of,
    patchy_page,
    prepared_prompt,
    reduced_budget,
    reduced_prompt,
    tokens_of,
    true_positions,
)
from tests.support.thorough import is_thorough, others_slow

Checkpoints = Callable[[str], Path]
SMALL, LARGE = picture(1, 190, 130), patchy_page(2, 560, 800)
ENCODER_METHODS = [name for name, method in METHODS.items() if method.kind == "encoder"]
DROPPING = [name for name in ENCODER_METHODS if not METHODS[name].merges]
WITHOUT_TOWER = [name for name in ENCODER_METHODS if not METHODS[name].needs & {"attention", "keys"}]

USUAL = [name for name in ANY_SIZE if name != "qwen2_vl"]
"""Architectures of the default run. Qwen2-VL has the tower of Qwen2.5-VL without windows."""
ONE = pytest.mark.parametrize("pair", others_slow(ANY_SIZE, ["qwen3_vl"]), indirect=True)
"""For tests of what does not depend on the tower. With the fixture's order, nothing is made twice."""


@dataclass(frozen=True)
class Pair:
    """An engine, and transformers' model of the same checkpoint."""

    engine: Engine
    decoder: Decoder


@pytest.fixture(scope="module", params=others_slow(ANY_SIZE, USUAL))
def pair(request: pytest.FixtureRequest, checkpoint: Checkpoints) -> Iterator[Pair]:
    folder = checkpoint(request.param)
    with engine(folder, kv_blocks=128) as machine:
        yield Pair(machine, Decoder(folder))


@pytest.fixture(scope="module")
def llava(checkpoint: Checkpoints) -> Iterator[Pair]:
    folder = checkpoint("llava")
    with engine(folder, kv_blocks=64) as machine:
        yield Pair(machine, Decoder(folder))


def run_prompt(machine: Engine, prompt: ChatPrompt) -> tuple[PreparedPrompt, list[VisualFeatures], list[int]]:
    """The prepared prompt, the features of its images, and the engine's answer."""
    answer = tokens_of(machine.generate(prompt, **GREEDY))
    prepared = prepared_prompt(machine, prompt)
    return prepared, [features_of(machine, span) for span in prepared.spans], answer


def assert_as_transformers(pair: Pair, prompt: ChatPrompt) -> tuple[PreparedPrompt, list[VisualFeatures]]:
    """The engine's answer is that of transformers' decoder with the same embeddings at their true places."""
    prepared, features, answer = run_prompt(pair.engine, prompt)
    positions = true_positions(prepared, [entry.places for entry in features], len(answer))
    assert_greedy(pair.decoder.logits(prepared, features, positions, answer), answer)
    return prepared, features


def their_features(pair: Pair, image: Image) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """transformers' visual tokens of the whole image, and their DeepStack levels."""
    processor = pair.engine.parts.preparer.builder.processor
    ((planned,),) = [prepared_prompt(pair.engine, ask("?", image)).images]
    processed = processor.process(image, planned.plan)
    pixels = in_time(processed.arrays["pixel_values"], processor.frames)
    return pair.decoder.encode(torch.from_numpy(pixels), planned.plan.grid)


@ONE
@pytest.mark.parametrize("method", sorted(METHODS))
def test_keep_everything_is_the_plain_path(pair: Pair, method: str) -> None:
    plain = prepared_prompt(pair.engine, ask("what is it?", SMALL))
    total = plain.image_tokens
    for wish in ({"keep": 1}, {"keep": 1.0}, {"budget": total}, {"budget": 10**6}):
        prepared = prepared_prompt(pair.engine, reduced_prompt("what is it?", SMALL, method=method, **wish))
        assert (prepared.ids, prepared.spans) == (plain.ids, plain.spans)
        assert [(image.plan, image.key) for image in prepared.images] == [
            (image.plan, image.key) for image in plain.images
        ]


@ONE
def test_keep_everything_shares_every_cache_with_it(pair: Pair) -> None:
    image = picture(11, 190, 130)
    pair.engine.clear_caches("kv")  # the blocks of other tests would be evicted meanwhile
    plain = pair.engine.generate(ask("what is it?", image), **GREEDY)
    before = pair.engine.stats()
    for method in METHODS:
        again = pair.engine.generate(reduced_prompt("what is it?", image, method=method, keep=1), **GREEDY)
        assert again.token_ids == plain.token_ids
        assert again.usage.cached > again.usage.image
        assert (again.images[0].method, again.images[0].full) == (None, None)
    after = pair.engine.stats()
    for name in ("images_encoded", "embed_cache_entries", "region_cache_misses", "kv_blocks_cached"):
        assert after[name] == before[name], name


@ONE
@pytest.mark.parametrize("method", WITHOUT_TOWER)
def test_methods_that_reduce_the_encoders_output(pair: Pair, method: str) -> None:
    assert_reduces(pair, method)


@pytest.mark.parametrize("method", [name for name in ENCODER_METHODS if name not in WITHOUT_TOWER])
def test_methods_that_use_the_tower_reduce_its_output(pair: Pair, method: str) -> None:
    assert_reduces(pair, method)


def assert_reduces(pair: Pair, method: str) -> None:
    """The number of tokens is as planned, DeepStack has the same index, and the answer is transformers'."""
    prepared, (features,) = assert_as_transformers(
        pair, reduced_prompt("what is it?", SMALL, method=method, keep=0.4)
    )
    (span,) = prepared.spans
    rows, columns = grid_of(span)
    kept = -(-rows * columns * 4 // 10)
    assert (span.tokens, span.length, span.full_tokens) == (kept, kept, rows * columns)
    assert prepared.ids.count(pair.engine.runner.model.image_token_id) == kept
    assert features.places is not None
    index = features.places[:, 0].long() * columns + features.places[:, 1].long()
    assert index.tolist() == sorted(set(index.tolist()))
    whole, levels = their_features(pair, SMALL)
    assert len(features.deepstack) == len(levels)
    if method in DROPPING:
        for ours, theirs in zip((features.embeds, *features.deepstack), (whole, *levels), strict=True):
            torch.testing.assert_close(ours, theirs[index], atol=1e-4, rtol=1e-4)
    assert_idle(pair.engine)


def test_merged_tokens_average_every_level_over_the_same_members(pair: Pair) -> None:
    """With a budget of one, the token is the mean of all tokens, and so is each of its DeepStack levels."""
    _, (features,), _ = run_prompt(pair.engine, reduced_prompt("what is it?", SMALL, method="tome", budget=1))
    whole, levels = their_features(pair, SMALL)
    for ours, theirs in zip((features.embeds, *features.deepstack), (whole, *levels), strict=True):
        torch.testing.assert_close(ours, theirs.mean(0, keepdim=True), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("image", "wish"),
    [
        pytest.param(image, wish, id=f"{wish}-{label}", marks=[] if quick else pytest.mark.slow)
        for label, image in (("one region", SMALL), ("regions", LARGE))
        for wish in ({"keep": 0.5}, {"budget": 7}, {"budget": 1})
        for quick in [(wish == {"budget": 7}) is (image is LARGE)]
    ],
)
def test_relevance(pair: Pair, image: Image, wish: dict[str, float]) -> None:
    prepared, (features,) = assert_as_transformers(pair, reduced_prompt("read the small text", image, **wish))
    (span,) = prepared.spans
    rows, columns = grid_of(span)
    expected_tokens = int(wish.get("budget", -(-rows * columns // 2)))
    assert (span.tokens, span.full_tokens) == (expected_tokens, rows * columns)
    assert features.places is not None
    assert features.places.shape == (expected_tokens, 2)
    low, high = features.places.min(0).values.tolist(), features.places.max(0).values.tolist()
    assert min(low) >= 0
    assert high[0] < rows
    assert high[1] < columns
    assert_idle(pair.engine)


def test_resize_is_a_smaller_picture(pair: Pair) -> None:
    """There are never more tokens than the budget, and the image is plain, as with `max_pixels`."""
    for image in (SMALL, LARGE, picture(3, 600, 40)):
        full = prepared_prompt(pair.engine, ask("?", image)).image_tokens
        # In the default run, the largest picture is asked for with the fewest tokens only.
        for budget in {full - 1, full // 2, 9} if image is SMALL or is_thorough() else {9}:
            prepared, _ = assert_as_transformers(
                pair, reduced_prompt("?", image, method="resize", budget=budget)
            )
            assert prepared.image_tokens <= budget
            assert prepared.spans[0].full_tokens == 0


def test_every_image_has_its_own_budget_and_text_continues_after_whole_images(pair: Pair) -> None:
    """The images have different methods, one has none, and there is text before, between and after them."""
    parts = (
        TextPart("the red circle"), ImagePart(SMALL, reduced_budget("dart", keep=0.5)), TextPart("left of"),
        ImagePart(LARGE, reduced_budget("relevance", budget=90)),
        ImagePart(picture(4, 90, 200)), TextPart("the square"),
        ImagePart(picture(5, 200, 90), reduced_budget("visionzip", keep=0.25)), TextPart("?"),
    )  # fmt: skip
    prompt = ChatPrompt((Message("system", (TextPart("Describe."),)), Message("user", parts)))
    prepared, _ = assert_as_transformers(pair, prompt)
    full = [
        prepared_prompt(pair.engine, ask("?", part.image)).image_tokens
        for part in parts
        if isinstance(part, ImagePart)
    ]
    assert [span.tokens for span in prepared.spans] == [-(-full[0] // 2), 90, full[2], -(-full[3] // 4)]
    done = pair.engine.generate(prompt, **GREEDY)
    assert [image.method for image in done.images] == ["dart", "relevance", None, "visionzip"]
    assert [image.full for image in done.images] == [full[0], full[1], None, full[3]]
    assert done.usage.image == prepared.image_tokens


def test_positions_do_not_depend_on_chunks(checkpoint: Checkpoints) -> None:
    """Chunks of a few tokens end inside reduced images, and a small KV pool preempts sequences there."""
    prompts = [
        reduced_prompt("what is it?", SMALL, picture(6, 130, 190), method="dpp", keep=0.5),
        reduced_prompt("where is the red circle?", LARGE, budget=60),
        reduced_prompt("where is the red circle?", SMALL, LARGE, method="fastv", budget=50),
    ]
    folder = checkpoint("qwen3_vl")
    with engine(folder, prefix_cache=False) as plain:
        truth = [tokens_of(plain.generate(prompt, **GREEDY)) for prompt in prompts]
    with engine(folder, max_step_tokens=7, kv_blocks=40, block_size=4, embed_cache_mib=0) as machine:
        for prompt, expected in zip(prompts, truth, strict=True):
            assert tokens_of(machine.generate(prompt, **GREEDY)) == expected
        assert_idle(machine)


@pytest.mark.parametrize("prefix_cache", others_slow([True, False], [True]))
def test_a_sequence_that_is_preempted_within_an_image_continues_at_its_position(
    checkpoint: Checkpoints, prefix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of the KV is reused or all is computed again, and the tokens keep their positions.

    The load of the engine has no effect here. Otherwise other tokens would be chosen.
    """
    monkeypatch.setattr(Tensions, "under", lambda tensions, load: tensions)
    prompts = [
        reduced_prompt(f"question {n}", picture(n, 190, 130), method="dpp", keep=0.7) for n in range(3)
    ]
    prompts += [reduced_prompt(f"question {n}", LARGE, budget=60) for n in range(3)]
    folder = checkpoint("qwen3_vl")
    with engine(folder, prefix_cache=False) as plain:
        truth = [tokens_of(plain.generate(prompt, **GREEDY)) for prompt in prompts]
    with engine(folder, max_step_tokens=7, block_size=4, prefix_cache=prefix_cache) as machine:
        step, scheduler = machine.loop._step, machine.scheduler

        def is_within_image(seq: Sequence) -> bool:
            return any(span.start < seq.computed_tokens < span.end for span in seq.spans)

        def preempt_and_step() -> None:
            for seq in [seq for seq in scheduler.running if is_within_image(seq) and not seq.preemptions]:
                scheduler._preempt(seq, Budget(7, 100))
            step()

        machine.loop._step = preempt_and_step  # type: ignore[method-assign]
        with ThreadPoolExecutor(len(prompts)) as pool, all_at_once(machine, len(prompts)):
            answers = pool.map(lambda prompt: tokens_of(machine.generate(prompt, **GREEDY)), prompts)
        assert list(answers) == truth
        assert scheduler.preemptions == len(prompts)
        assert_idle(machine)


@ONE
def test_choices_of_one_prompt(pair: Pair) -> None:
    prompt = reduced_prompt("what is it?", SMALL, method="dart", keep=0.5)
    one = pair.engine.generate(prompt, **GREEDY)
    three = pair.engine.generate(prompt, n=3, **GREEDY)
    assert three.token_ids == one.token_ids * 3
    assert len(three.images) == 1


def test_videos_are_not_reduced(checkpoint: Checkpoints) -> None:
    film = to_video(clip())
    parts = (VideoPart(film), TextPart("what moved?"))
    prompt = ChatPrompt((Message("user", parts),))
    with engine(checkpoint("qwen3_vl")) as plain:
        expected = prepared_prompt(plain, prompt)
        answer = plain.generate(prompt, **GREEDY).token_ids
    with engine(checkpoint("qwen3_vl"), visual_tokens="relevance:0.25") as policy:
        prepared = prepared_prompt(policy, prompt)
        assert (prepared.ids, prepared.spans) == (expected.ids, expected.spans)
        assert policy.generate(prompt, **GREEDY).token_ids == answer
        both = ChatPrompt((Message("user", (ImagePart(LARGE), *parts)),))
        spans = prepared_prompt(policy, both).spans
        assert spans[0].full_tokens
        assert [span.tokens for span in spans[1:]] == [span.tokens for span in expected.spans]


@pytest.mark.parametrize("method", WITHOUT_TOWER)
def test_positions_of_one_number(llava: Pair, method: str) -> None:
    """Kept tokens keep their positions, and text continues after the position of the whole image."""
    images = picture(1, 90, 90), picture(2, 60, 120)
    prompt = reduced_prompt("what is it?", *images, method=method, keep=0.3)
    prepared, features, answer = run_prompt(llava.engine, prompt)
    full = prepared_prompt(llava.engine, ask("?", images[0])).image_tokens
    positions, cursor = [], 0
    for span, entry in zip(prepared.spans, features, strict=True):
        assert (span.tokens, span.full_tokens) == (-(-full * 3 // 10), full)
        text = span.start - len(positions)
        positions += range(cursor, cursor + text)
        assert entry.places is not None
        positions += [cursor + text + place for (place,) in entry.places.tolist()]
        cursor += text + full
    positions += range(cursor, cursor + len(prepared.ids) + len(answer) - len(positions))
    assert_greedy(llava.decoder.logits(prepared, features, torch.tensor(positions), answer), answer)
    assert_idle(llava.engine)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("relevance", "relevance encodes images region by region, which this model does not support"),
        ("resize", "this model's images have fixed sizes"),
        ("visionzip", "visionzip needs the attention inside the vision encoder"),
    ],
)
def test_methods_that_a_model_does_not_support_are_refused(llava: Pair, method: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        llava.engine.generate(reduced_prompt("what is it?", SMALL, method=method, keep=0.5), **GREEDY)
    assert caught.value.param == "visual_tokens.method"
    assert f"accepted: {', '.join(WITHOUT_TOWER)}" in caught.value.message
    with pytest.raises(InvalidRequest, match=message):  # also without an image, where once it was accepted
        llava.engine.generate("what is it?", budget=reduced_budget(method, keep=0.5), **GREEDY)
    assert llava.engine.generate("what is it?", budget=reduced_budget(method, keep=1), **GREEDY).text
    assert llava.engine.generate("what is it?", budget=reduced_budget(method, budget=9), **GREEDY).text
    assert llava.engine.generate(reduced_prompt("what?", SMALL, method=method, keep=1), **GREEDY).text


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        (
            "llava",
            {"visual_tokens": "relevance:0.5"},
            "visual_tokens: relevance encodes images region by region",
        ),
        (
            "llava",
            {"degrade_by": "visionzip", "degrade_from": 0.5},
            "degrade_by: visionzip needs the attention",
        ),
        ("idefics3", {"visual_tokens": "fast"}, "visual_tokens: this model writes text between"),
    ],
)
def test_a_setting_that_a_model_does_not_support_is_refused_at_the_start(
    checkpoint: Checkpoints, architecture: str, settings: dict[str, Any], message: str
) -> None:
    """Before, every request with an image was refused, with an error about a field that it did not have."""
    with pytest.raises(ConfigError, match=message):
        engine(checkpoint(architecture), **settings)


@pytest.mark.parametrize("architecture", ["llava_next", "llava_onevision"])
def test_models_with_tiles_support_methods_after_the_encoder(
    checkpoint: Checkpoints, architecture: str
) -> None:
    with engine(checkpoint(architecture), kv_blocks=64) as machine:
        full = prepared_prompt(machine, ask("?", SMALL)).image_tokens
        done = machine.generate(reduced_prompt("what is it?", SMALL, method="dart", keep=0.5), **GREEDY)
        assert (done.usage.image, done.images[0].full) == (-(-full // 2), full)
        assert_idle(machine)


@pytest.mark.parametrize("architecture", others_slow(["idefics3", "smolvlm"], ["idefics3"]))
@pytest.mark.parametrize("method", ["uniform", "visionzip", "resize", "relevance"])
def test_text_between_tiles_is_never_left_out(
    checkpoint: Checkpoints, architecture: str, method: str
) -> None:
    with engine(checkpoint(architecture), kv_blocks=64) as machine:
        with pytest.raises(InvalidRequest, match="text between the tiles") as caught:
            machine.generate(reduced_prompt("what is it?", SMALL, method=method, keep=0.5), **GREEDY)
        assert caught.value.param == "visual_tokens.method"
        assert machine.generate(reduced_prompt("what?", SMALL, method=method, keep=1), **GREEDY).text


def test_the_preset_fast_has_a_fallback(llava: Pair) -> None:
    (use,) = llava.engine.generate(reduced_prompt("what?", SMALL, method="fast"), **GREEDY).images
    assert (use.method, use.tokens) == (
        "dpp",
        -(-prepared_prompt(llava.engine, ask("?", SMALL)).image_tokens // 2),
    )


@ONE
def test_presets(pair: Pair) -> None:
    full = prepared_prompt(pair.engine, ask("?", SMALL)).image_tokens
    for name, preset in PRESETS.items():
        done = pair.engine.generate(reduced_prompt("what?", SMALL, method=name), **GREEDY)
        assert done.images[0].method == preset.method
        assert done.usage.image == -(-full * int(100 * preset.keep) // 100)


@ONE
def test_a_preset_refuses_other_numbers(pair: Pair) -> None:
    """`method` may name a preset.

    Before, the preset's share silently replaced the request's keep or budget.
    """
    for wish in ({"keep": 0.9}, {"budget": 3}):
        with pytest.raises(InvalidRequest, match="the preset fast sets how much is kept"):
            prepared_prompt(pair.engine, reduced_prompt("?", SMALL, method="fast", **wish))
