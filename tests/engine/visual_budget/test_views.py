"""Tests of several images on one budget: their plans, and answers compared with images resized by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fovea import Engine
from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.media import Image, PixelBudget, VisualTokens, content_identity
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.visual_budget.choose import ReducedPlan, RequestContext, VisualBudget
from tests.engine.visual_budget.test_choose import SETTINGS, Letters, processor
from tests.support.engines import ask, assert_idle, engine, picture
from tests.support.reduced import GREEDY, patchy_page, prepared_prompt, reduced_budget, reduced_prompt
from tests.support.thorough import examples

Checkpoints = Callable[[str], Path]
VIEWS = "views"
PAGES = [patchy_page(number, 480, 640) for number in range(3)]


def noise(seed: int, width: int, height: int) -> Image:
    rgb = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8).tobytes()
    return Image(content_identity("test", width, height, rgb), width, height, rgb)


def token_counts(images: list[Image], question: str, *wishes: VisualTokens | None) -> list[tuple[int, int]]:
    """For each image, the tokens of its reduced plan and of its full plan. wishes: one per image, or one."""
    tokenizer: Any = Letters()
    budget = VisualBudget(processor(), tokenizer.encode, None)
    parts = [
        ImagePart(image, PixelBudget("high", visual=wishes[index % len(wishes)]))
        for index, image in enumerate(images)
    ]
    plans = [processor().plan(part.image.width, part.image.height, part.budget) for part in parts]
    context = RequestContext(question, "salt", 0.0, ((question, len(images)),))
    result = budget.reduce_all(parts, plans, context)
    for part, plan, one in zip(parts, plans, result, strict=True):
        if one is not None:
            assert_as_resized(part, one, context)
            assert one.plan.tokens < plan.tokens
    return [
        (plan.tokens if one is None else one.plan.tokens, plan.tokens)
        for plan, one in zip(plans, result, strict=True)
    ]


def assert_as_resized(part: ImagePart, one: ReducedPlan, context: RequestContext) -> None:
    """The plan is one that the processor makes for that size. Its key has no part of the question."""
    height, width = one.plan.sizes[0]
    by_hand = processor().plan(
        part.image.width, part.image.height, PixelBudget("high", max_pixels=height * width)
    )
    assert one.plan.reduction is None
    assert one.key == context.key(part.image, one.plan)
    assert context.question not in one.key
    assert by_hand.key.split(";")[0] == "qwen"


sides = st.tuples(st.integers(20, 700), st.integers(20, 700))


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(sides, min_size=2, max_size=5), st.floats(0.001, 1), st.integers(1, 900), st.booleans(),
    st.sampled_from(["what is it?", "what is in the second image?", "compare the first and the last image"]),
)  # fmt: skip
def test_a_budget_is_never_exceeded(
    sizes: list[tuple[int, int]], keep: float, budget: int, share: bool, question: str
) -> None:
    images = [noise(index % 3, *size) for index, size in enumerate(sizes)]
    wish = VisualTokens(VIEWS, keep=keep) if share else VisualTokens(VIEWS, budget=max(len(images), budget))
    result = token_counts(images, question, wish)
    full = sum(of for _, of in result)
    total = wish.budget if wish.budget is not None else max(len(images), -int(-full * keep // 1))
    assert sum(tokens for tokens, _ in result) <= total
    assert all(tokens >= 1 for tokens, _ in result)
    named = [1] if "second" in question else [0, len(images) - 1] if "last" in question else []
    if sum(result[view][1] for view in named) + len(images) - len(named) <= total:
        assert all(result[view][0] == result[view][1] for view in named), (
            "a named image that fits keeps all tokens"
        )
    if max(of for _, of in result) + len(images) - 1 <= total:
        assert any(tokens == of for tokens, of in result)


def test_images_with_the_same_numbers_share_a_budget() -> None:
    """Images with other numbers have budgets of their own."""
    images = [noise(number, 280, 280) for number in range(5)]
    few, many = VisualTokens(VIEWS, budget=50), VisualTokens(VIEWS, budget=150)
    result = token_counts(
        images, "what is in the last image?", few, many, few, many, VisualTokens("resize", budget=20)
    )
    tokens = [tokens for tokens, _ in result]
    assert tokens[0] + tokens[2] <= 50
    assert 100 < tokens[1] + tokens[3] <= 150
    assert 9 <= tokens[4] <= 20
    again = token_counts(images, "?", few, replace(few, explain=True))
    assert sum(tokens for tokens, _ in again) <= 50, "explain does not make it another budget"
    assert token_counts(images, "?", None, few)[0] == (100, 100)


def test_the_second_of_two_identical_images_is_a_glance() -> None:
    page, other = noise(1, 560, 560), noise(2, 280, 280)
    result = token_counts([page, page, other], "what is it?", VisualTokens(VIEWS, budget=520))
    assert result[0] == (400, 400)
    assert result[2] == (100, 100)
    assert result[1][0] <= 20


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def machine(request: pytest.FixtureRequest, checkpoint: Checkpoints) -> Iterator[Engine]:
    with engine(checkpoint(request.param)) as machine:
        yield machine


def image_tokens(machine: Engine, prompt: ChatPrompt) -> list[int]:
    return [image.plan.tokens for image in prepared_prompt(machine, prompt).images]


def test_the_named_image_keeps_its_tokens(machine: Engine) -> None:
    plain = image_tokens(machine, ask("?", *PAGES))
    for words, close in (
        ("what is in the second image?", 1),
        ("read the last page", 2),
        ("describe image 1", 0),
    ):
        result = image_tokens(machine, reduced_prompt(words, *PAGES, method=VIEWS, budget=plain[close] + 40))
        assert [view for view in range(3) if result[view] == plain[view]] == [close]
        assert sum(result) <= plain[close] + 40
    result = image_tokens(
        machine, reduced_prompt("compare the first with the third", *PAGES, method=VIEWS, keep=0.7)
    )
    assert [result[0], result[2]] == [plain[0], plain[2]]


def test_answers_are_those_of_images_resized_by_hand(machine: Engine) -> None:
    """Answers are equal, and use the same encoder outputs and KV: nothing is encoded or prefilled twice."""
    words = "what is in the second image?"
    answer = machine.generate(reduced_prompt(words, *PAGES, method=VIEWS, keep=0.4), **GREEDY)
    assert answer.usage.image == sum(image.tokens for image in answer.images)
    assert [image.method for image in answer.images] == [VIEWS, None, VIEWS]
    plans = [
        image.plan
        for image in prepared_prompt(machine, reduced_prompt(words, *PAGES, method=VIEWS, keep=0.4)).images
    ]
    parts = [
        ImagePart(page, PixelBudget() if number == 1 else reduced_budget("resize", budget=plan.tokens + 4))
        for number, (page, plan) in enumerate(zip(PAGES, plans, strict=True))
    ]
    by_hand = ChatPrompt((Message("user", (*parts, TextPart(words))),))
    assert image_tokens(machine, by_hand) == [plan.tokens for plan in plans]
    before = machine.stats()
    again = machine.generate(by_hand, **GREEDY)
    assert again.token_ids == answer.token_ids
    assert again.usage.cached > again.usage.image
    assert machine.stats()["images_encoded"] == before["images_encoded"]
    machine.clear_caches("kv")
    assert machine.generate(by_hand, **GREEDY).token_ids == answer.token_ids
    assert_idle(machine)


def test_an_image_that_keeps_its_plan_shares_the_caches_of_a_plain_one(machine: Engine) -> None:
    pages = [patchy_page(number, 480, 640) for number in (7, 8)]
    machine.generate(ask("what is it?", pages[0]), **GREEDY)
    before = machine.stats()
    done = machine.generate(reduced_prompt("what is in image 1?", *pages, method=VIEWS, keep=0.6), **GREEDY)
    assert done.images[0].method is None
    assert done.usage.cached >= done.images[0].tokens, "its KV is reused, too"
    assert machine.stats()["images_encoded"] == before["images_encoded"] + 1, "the glance"


def test_one_image_or_a_budget_for_all_tokens_changes_nothing(machine: Engine) -> None:
    cases: list[tuple[list[Image], dict[str, Any]]] = [
        (PAGES[:1], {"keep": 0.1}),
        (PAGES[:1], {"budget": 1}),
        (PAGES, {"keep": 1}),
        (PAGES, {"budget": 10**6}),
    ]
    for images, wish in cases:
        plain = prepared_prompt(machine, ask("what is it?", *images))
        result = prepared_prompt(machine, reduced_prompt("what is it?", *images, method=VIEWS, **wish))
        assert (result.ids, result.spans) == (plain.ids, plain.spans)
        assert [image.reduction for image in result.images] == [None] * len(images)


def test_a_follow_up_keeps_the_image_that_it_names(machine: Engine) -> None:
    budget = reduced_budget(VIEWS, keep=0.5)
    first = reduced_prompt("what is in the last image?", *PAGES[:2], method=VIEWS, keep=0.5).messages
    said = Message("assistant", (TextPart("a page"),))
    later = Message("user", (ImagePart(PAGES[2], budget), TextPart("and in image 1?")))
    plain = image_tokens(machine, ask("?", *PAGES))
    result = image_tokens(machine, ChatPrompt((*first, said, later)))
    assert result[0] == plain[0]
    assert result[1] > result[2], "image 1 was named last in the first turn"
    assert sum(result) <= -(-sum(plain) // 2)


def test_fewer_tokens_than_images_are_refused(machine: Engine) -> None:
    with pytest.raises(
        InvalidRequest, match="2 tokens for 3 images; views gives each image a token or more"
    ) as caught:
        machine.generate(reduced_prompt("?", *PAGES, method=VIEWS, budget=2), **GREEDY)
    assert caught.value.param == "visual_tokens"
    assert "accepted: 3 or more" in caught.value.message
    assert image_tokens(machine, reduced_prompt("?", *PAGES, method=VIEWS, budget=3)) == [1, 1, 1]
    assert image_tokens(machine, reduced_prompt("?", *PAGES, method=VIEWS, keep=0.0001)) == [1, 1, 1]


@pytest.mark.parametrize(
    ("architecture", "message"),
    [("llava", "fixed sizes and cannot be made smaller"), ("idefics3", "writes text between the tiles")],
)
def test_models_whose_images_cannot_be_made_smaller_refuse_it(
    checkpoint: Checkpoints, architecture: str, message: str
) -> None:
    small = [picture(1, 190, 130), picture(2, 190, 130)]
    with engine(checkpoint(architecture), kv_blocks=64) as machine:
        with pytest.raises(InvalidRequest, match=message) as caught:
            machine.generate(reduced_prompt("?", *small, method=VIEWS, keep=0.5), **GREEDY)
        assert caught.value.param == "visual_tokens.method"
        assert machine.generate(reduced_prompt("?", *small, method=VIEWS, keep=1), **GREEDY).text
    with pytest.raises(ConfigError, match=f"visual_tokens: this model.*{message}"):
        engine(checkpoint(architecture), visual_tokens="views:0.5")


@pytest.mark.parametrize("method", ["resize", VIEWS])
def test_a_processor_that_does_not_resize_refuses_it_by_name(method: str) -> None:
    from fovea.engine.vision.processor import build

    fixed = build(
        "qwen2_vl", SETTINGS | {"do_resize": False}, {"vision_config": {"spatial_merge_size": 2}}, {}
    )
    tokenizer: Any = Letters()
    with pytest.raises(ConfigError, match="cannot be made smaller; accepted: uniform"):
        VisualBudget(fixed, tokenizer.encode, VisualTokens(method, 0.5))
