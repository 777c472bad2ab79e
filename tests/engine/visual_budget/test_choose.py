"""How many tokens a request gets, and which of its words and settings are in the name of an image: no model, no pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from fovea.core.image import Image, PixelBudget, VisualTokens
from fovea.engine.vision.processor import build
from fovea.engine.vision.processor.qwen import QwenProcessor
from fovea.engine.visual_budget.choose import QUESTION_IDS, ReducedPlan, RequestContext, VisualBudget
from fovea.engine.visual_budget.methods import METHODS

SINGLE_IMAGE = sorted(name for name, method in METHODS.items() if method.kind != "views")
"""Methods that look at one image by itself."""
SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
    "min_pixels": 4 * 28**2, "max_pixels": 1024 * 28**2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


class Letters:
    """A tokenizer: a token is a letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def budget_planner(visual: VisualTokens | None = None) -> VisualBudget:
    tokenizer: Any = Letters()
    return VisualBudget(processor(), tokenizer.encode, visual)


def processor() -> QwenProcessor:
    made = build("qwen2_vl", SETTINGS, {"vision_config": {"spatial_merge_size": 2}}, {})
    assert isinstance(made, QwenProcessor)
    return made


def blank(width: int, height: int) -> Image:
    return Image("a picture", width, height, bytes(3 * width * height))


def chosen(wish: VisualTokens, context: RequestContext, width: int = 300, height: int = 500) -> ReducedPlan:
    budget = PixelBudget("high", visual=wish)
    found = budget_planner().reduce(
        blank(width, height), processor().plan(width, height, budget), budget, context
    )
    assert found is not None
    return found


CONTEXT = RequestContext("what is it?", "salt", 0.0)


@given(st.integers(8, 900), st.integers(8, 900), st.integers(1, 1100), st.sampled_from(SINGLE_IMAGE))
def test_a_budget_is_never_exceeded(width: int, height: int, budget: int, method: str) -> None:
    pixels = PixelBudget("high", visual=VisualTokens(method, budget=budget))
    if max(width, height) > 200 * min(width, height):
        return
    full = processor().plan(width, height, pixels)
    found = budget_planner().reduce(blank(width, height), full, pixels, CONTEXT)
    if found is None:
        assert full.tokens <= budget or method == "resize", "a picture of one row cannot be made smaller"
        assert full.tokens <= budget or 1 in (full.grid[1] // 2, full.grid[2] // 2)
        return
    plan = found.plan
    assert plan.tokens <= budget
    assert plan.text == processor().marker * plan.tokens
    if method != "resize":
        assert plan.tokens == budget
        assert plan.grid == full.grid
        assert plan.reduction is not None
        assert plan.reduction.full_tokens == full.tokens


def test_what_is_in_the_name_of_an_image() -> None:
    """Everything that changes which tokens there are, and nothing else."""
    names = {
        chosen(wish, asked).key
        for wish in (VisualTokens("dart", 0.5), VisualTokens("dart", 0.25), VisualTokens("dpp_query", 0.5))
        for asked in (CONTEXT, replace(CONTEXT, salt="other"), replace(CONTEXT, question="how many?"))
    }
    assert len(names) == 2 + 2 + 3, "dart does not read the question"
    same = chosen(
        VisualTokens("dart", budget=chosen(VisualTokens("dart", 0.5), CONTEXT).plan.tokens, explain=True),
        CONTEXT,
    )
    assert same.key in names, "a share and its number are one image"
    for method in SINGLE_IMAGE:
        busy = chosen(VisualTokens(method, 0.5), replace(CONTEXT, load=0.9))
        assert (busy.key == chosen(VisualTokens(method, 0.5), CONTEXT).key) is (method != "relevance")


def test_load_counts_in_quarters() -> None:
    """Else no two requests of a busy server would share anything."""
    found = {
        chosen(VisualTokens("relevance", 0.5), replace(CONTEXT, load=load)).key
        for load in (0.0, 0.1, 0.3, 0.2, 0.9, 1.0, 7.0)
    }
    assert len(found) == 3


def test_the_question_is_for_methods_that_read_it() -> None:
    long = replace(CONTEXT, question="x" * 1000)
    for method in SINGLE_IMAGE:
        reduction = chosen(VisualTokens(method, 0.5), long).plan.reduction
        if reduction is not None:
            reads = METHODS[method].query_aware
            assert len(reduction.word_ids) == (QUESTION_IDS if reads else 0)
            assert bool(reduction.question) is reads


def test_without_words_there_is_no_question() -> None:
    """An image that is sent ahead of any: what was made of it serves whoever says nothing, too."""
    for question in ("", " \n"):
        reduction = chosen(VisualTokens("dpp_query", 0.5), replace(CONTEXT, question=question)).plan.reduction
        assert reduction is not None
        assert (reduction.word_ids, reduction.question) == ((), "")


def test_a_wish_comes_before_the_policy() -> None:
    policy = budget_planner(VisualTokens("dart", 0.25))
    plan = processor().plan(300, 500, PixelBudget("high"))
    image = blank(300, 500)

    def method(budget: PixelBudget) -> str | None:
        found = policy.reduce(image, plan, budget, CONTEXT)
        return None if found is None else found.method

    assert method(PixelBudget("high")) == "dart"
    assert method(PixelBudget("high", visual=VisualTokens("dpp", 0.5))) == "dpp"
    assert method(PixelBudget("high", visual=VisualTokens("dpp", 1))) is None
    assert method(PixelBudget("high", visual=VisualTokens("document"))) is None
