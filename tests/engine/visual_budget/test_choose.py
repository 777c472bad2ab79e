"""Tests of the visual budget: the number of tokens, and the parts of an image's key. No model, no pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from fovea.core.media import Image, PixelBudget, VisualTokens
from fovea.engine.vision.processor import build
from fovea.engine.vision.processor.qwen import QwenProcessor
from fovea.engine.visual_budget.choose import QUESTION_IDS, ReducedPlan, RequestContext, VisualBudget
from fovea.engine.visual_budget.methods import METHODS

SINGLE_IMAGE = sorted(name for name, method in METHODS.items() if method.kind != "views")
"""Methods that plan an image without the other ones of its request."""
SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
    "min_pixels": 4 * 28**2, "max_pixels": 1024 * 28**2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


class Letters:
    """A tokenizer with one token per letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def budget_planner(visual: VisualTokens | None = None) -> VisualBudget:
    tokenizer: Any = Letters()
    return VisualBudget(processor(), tokenizer.encode, visual)


def processor() -> QwenProcessor:
    result = build("qwen2_vl", SETTINGS, {"vision_config": {"spatial_merge_size": 2}}, {})
    assert isinstance(result, QwenProcessor)
    return result


def blank(width: int, height: int) -> Image:
    return Image("a picture", width, height, bytes(3 * width * height))


def reduced_plan(
    wish: VisualTokens, context: RequestContext, width: int = 300, height: int = 500
) -> ReducedPlan:
    budget = PixelBudget("high", visual=wish)
    reduced = budget_planner().reduce(
        blank(width, height), processor().plan(width, height, budget), budget, context
    )
    assert reduced is not None
    return reduced


CONTEXT = RequestContext("what is it?", "salt", 0.0)


@given(st.integers(8, 900), st.integers(8, 900), st.integers(1, 1100), st.sampled_from(SINGLE_IMAGE))
def test_a_budget_is_never_exceeded(width: int, height: int, budget: int, method: str) -> None:
    pixels = PixelBudget("high", visual=VisualTokens(method, budget=budget))
    if max(width, height) > 200 * min(width, height):
        return
    full = processor().plan(width, height, pixels)
    reduced = budget_planner().reduce(blank(width, height), full, pixels, CONTEXT)
    if reduced is None:
        assert full.tokens <= budget or method == "resize", "a picture of one row cannot be made smaller"
        assert full.tokens <= budget or 1 in (full.grid[1] // 2, full.grid[2] // 2)
        return
    plan = reduced.plan
    assert plan.tokens <= budget
    assert plan.text == processor().marker * plan.tokens
    if method != "resize":
        assert plan.tokens == budget
        assert plan.grid == full.grid
        assert plan.reduction is not None
        assert plan.reduction.full_tokens == full.tokens


def test_the_parts_of_an_image_key() -> None:
    """The key has everything that changes which tokens an image has, and nothing else."""
    keys = {
        reduced_plan(wish, context).key
        for wish in (VisualTokens("dart", 0.5), VisualTokens("dart", 0.25), VisualTokens("dpp_query", 0.5))
        for context in (CONTEXT, replace(CONTEXT, salt="other"), replace(CONTEXT, question="how many?"))
    }
    assert len(keys) == 2 + 2 + 3, "dart does not read the question"
    same = reduced_plan(
        VisualTokens(
            "dart", budget=reduced_plan(VisualTokens("dart", 0.5), CONTEXT).plan.tokens, explain=True
        ),
        CONTEXT,
    )
    assert same.key in keys, "a share and the equal number give the same key"
    for method in SINGLE_IMAGE:
        busy = reduced_plan(VisualTokens(method, 0.5), replace(CONTEXT, load=0.9))
        assert (busy.key == reduced_plan(VisualTokens(method, 0.5), CONTEXT).key) is (method != "relevance")


def test_load_counts_in_quarters() -> None:
    """Otherwise no two requests of a busy server would have equal keys."""
    keys = {
        reduced_plan(VisualTokens("relevance", 0.5), replace(CONTEXT, load=load)).key
        for load in (0.0, 0.1, 0.3, 0.2, 0.9, 1.0, 7.0)
    }
    assert len(keys) == 3


def test_only_methods_that_use_the_question_get_it() -> None:
    long = replace(CONTEXT, question="x" * 1000)
    for method in SINGLE_IMAGE:
        reduction = reduced_plan(VisualTokens(method, 0.5), long).plan.reduction
        if reduction is not None:
            looks = METHODS[method].by_region
            reads = METHODS[method].query_aware and not looks
            assert len(reduction.word_ids) == (QUESTION_IDS if reads else 0)
            assert bool(reduction.question) is looks


def test_the_words_of_the_last_turn_decide_how_much_is_enough() -> None:
    """A chat that began with a description kept all tokens to its end."""
    turns = (("Describe the image.", 1), ("What does the label say?", 1), ("", 1))
    context = replace(CONTEXT, question="\n".join(text for text, _ in turns), turns=turns)
    assert context.last_question == "What does the label say?"
    assert CONTEXT.last_question == CONTEXT.question


def test_a_blank_question_is_no_question() -> None:
    """The reduction is then that of an image which is encoded before any question is known."""
    for question in ("", " \n"):
        reduction = reduced_plan(
            VisualTokens("dpp_query", 0.5), replace(CONTEXT, question=question)
        ).plan.reduction
        assert reduction is not None
        assert (reduction.word_ids, reduction.question) == ((), "")


def test_the_request_takes_precedence_over_the_configuration() -> None:
    policy = budget_planner(VisualTokens("dart", 0.25))
    plan = processor().plan(300, 500, PixelBudget("high"))
    image = blank(300, 500)

    def method(budget: PixelBudget) -> str | None:
        reduced = policy.reduce(image, plan, budget, CONTEXT)
        return None if reduced is None else reduced.method

    assert method(PixelBudget("high")) == "dart"
    assert method(PixelBudget("high", visual=VisualTokens("dpp", 0.5))) == "dpp"
    assert method(PixelBudget("high", visual=VisualTokens("dpp", 1))) is None
    assert method(PixelBudget("high", visual=VisualTokens("document"))) is None
