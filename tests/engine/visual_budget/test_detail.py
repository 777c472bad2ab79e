"""Tests of the level of `detail: auto`, with and without load."""

from __future__ import annotations

import pytest

from fovea.core.media import PixelBudget, VisualTokens
from fovea.engine.config.schedule import VisualSettings
from fovea.engine.visual_budget.detail import (
    DETAIL_POLICIES,
    DetailRule,
    FullDetail,
    KeywordDetail,
    LevelDecision,
)


@pytest.mark.parametrize(
    ("question", "level", "why"),
    [
        ("Read the sign.", "high", "'read'"),
        ("What is written on it?", "high", "'written'"),
        ("Describe every DETAIL", "high", "'detail'"),
        ("the smallest one?", "high", "'smallest'"),
        ("How many cats are there?", "medium", "'many'"),
        ("Where is the red star?", "medium", "'where'"),
        ("Count the words", "high", "'words'"),
        ("Is it a cat?", "low", "no word"),
        # These contain the key words as parts of longer words.
        ("A thread, already somewhere in the county", "low", "no word"),
        ("", "high", "there is no question yet"),
        ("  \n", "high", "there is no question yet"),
    ],
)
def test_words_of_the_question_decide(question: str, level: str, why: str) -> None:
    decision = KeywordDetail().choose(question)
    assert decision.level == level
    assert why in decision.reason


def test_the_level_never_falls_in_a_conversation() -> None:
    """Otherwise the second question could not use the KV of the first."""
    policy, question, levels = KeywordDetail(), "", []
    for turn in ("What is it?", "And where?", "Is it nice?", "Read it", "Is it nice?"):
        question += turn + "\n"
        levels.append(policy.choose(question).level)
    assert levels == ["low", "medium", "medium", "high", "high"]


@pytest.mark.parametrize("detail", ["low", "medium", "high"])
@pytest.mark.parametrize("load", [0.0, 5.0])
def test_a_level_in_the_request_is_used(detail: str, load: float) -> None:
    budget = PixelBudget(detail)  # type: ignore[arg-type]
    reason = "the request sets the detail level"
    assert DetailRule(KeywordDetail(), 0.5).settle(budget, "is it?", load) == (budget, reason)


def test_pixels_in_the_request_take_precedence() -> None:
    budget = PixelBudget("auto", max_pixels=5000)
    assert DetailRule(KeywordDetail(), 0.5).settle(budget, "is it?", 9.0) == (
        budget,
        "the request sets pixels",
    )


@pytest.mark.parametrize(
    ("load", "level"),
    [(0.0, "high"), (0.49, "high"), (0.5, "medium"), (0.74, "medium"), (0.75, "low"), (3.0, "low")],
)
def test_load_lowers_by_a_level_and_then_another(load: float, level: str) -> None:
    budget, reason = DetailRule(FullDetail(), 0.5).settle(PixelBudget(), "Read it", load)
    assert budget.detail == level
    assert (f"lowered at a load of {load:.2f}" in reason) == (level != "high")


@pytest.mark.parametrize(("load", "keep"), [(0.49, None), (0.5, 0.5), (0.74, 0.5), (0.75, 0.25), (3.0, 0.25)])
def test_load_reduces_tokens_if_a_method_is_configured(load: float, keep: float | None) -> None:
    budget, reason = DetailRule(FullDetail(), 0.5, "dart").settle(PixelBudget(), "Read it", load)
    assert budget == PixelBudget(
        "high", visual=None if keep is None else VisualTokens("dart", keep, from_operator=True)
    )
    assert (f"the image keeps {keep} of its tokens at a load of {load:.2f}" in reason) == (keep is not None)


def test_relevance_keeps_under_load_what_the_question_needs_and_at_most_a_share() -> None:
    rule = DetailRule(FullDetail(), 0.5, "relevance")
    budget, reason = rule.settle(PixelBudget(), "Read it", 0.75)
    assert budget.visual == VisualTokens("relevance", "auto", from_operator=True, at_most=0.25)
    assert "as many tokens as the question needs and at most 0.25 of them at a load of 0.75" in reason


def test_a_request_that_sets_a_share_keeps_its_tokens_and_its_level() -> None:
    """Before, it lost a level, although load reduces tokens here, and not levels."""
    wish = VisualTokens("relevance", 0.75)
    budget, reason = DetailRule(FullDetail(), 0.5, "dart").settle(PixelBudget(visual=wish), "Read it", 2.0)
    assert budget == PixelBudget("high", visual=wish)
    assert "load" not in reason


def test_load_reduces_the_configured_share() -> None:
    """The share under load is a share of the configured quarter.

    Before, it was a share of all tokens, so images had more tokens under load than without.
    """
    rule = DetailRule.of(VisualSettings(visual_tokens="relevance:0.25", degrade_from=0.5, degrade_by="dart"))
    budget, _ = rule.settle(PixelBudget(), "Read it", 0.5)
    assert budget.visual == VisualTokens("dart", 0.125, from_operator=True)


def test_nothing_is_lower_than_low() -> None:
    budget, reason = DetailRule(KeywordDetail(), 0.5).settle(PixelBudget(), "Is it a cat?", 2.0)
    assert budget.detail == "low"
    assert "lowered" not in reason


def test_without_degradation_load_does_nothing() -> None:
    budget, _ = DetailRule(FullDetail()).settle(PixelBudget(), "", 100.0)
    assert budget.detail == "high"


def test_every_policy_of_the_configuration_exists() -> None:
    for name in DETAIL_POLICIES:
        rule = DetailRule.of(VisualSettings(detail_policy=name))
        assert isinstance(rule.policy.choose("x"), LevelDecision)
        assert rule.lossless == (name == "full")
    assert not DetailRule.of(VisualSettings(degrade_from=0.9)).lossless
