"""Tests of the methods' names, properties and counts, which need no pixels."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.core.errors import InvalidRequest
from fovea.core.media import VisualTokens
from fovea.engine.visual_budget.methods import (
    METHODS,
    PRESETS,
    find_method,
    keep_count,
    parse_visual_tokens,
    resolve_preset,
)


@given(st.integers(1, 20_000), st.integers(1, 1000))
def test_the_count_is_the_written_ratio_rounded_up(tokens: int, thousandths: int) -> None:
    exact = math.ceil(Fraction(tokens * thousandths, 1000))
    assert keep_count(tokens, thousandths / 1000) == exact
    assert 1 <= exact <= tokens


def test_a_ratio_that_binary_fractions_make_a_little_larger() -> None:
    """100 * 0.07 is 7.000000000000001 in floating point, which rounds up to 8."""
    assert math.ceil(100 * 0.07) == 8
    assert keep_count(100, 0.07) == 7


@given(st.integers(1, 5000), st.floats(0, 1, exclude_min=True), st.floats(0, 1, exclude_min=True))
def test_a_larger_ratio_never_keeps_less(tokens: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert keep_count(tokens, low) <= keep_count(tokens, high)


@pytest.mark.parametrize("ratio", [0, -0.5, 1.01, math.nan, math.inf])
def test_a_ratio_outside_its_range_is_refused(ratio: float) -> None:
    with pytest.raises(InvalidRequest, match="accepted: more than 0, at most 1") as caught:
        keep_count(10, ratio)
    assert caught.value.param == "visual_tokens"


def test_an_unknown_name_is_refused_and_the_error_lists_the_known_names() -> None:
    with pytest.raises(InvalidRequest, match="no method 'dart2'") as caught:
        find_method("dart2")
    assert caught.value.param == "visual_tokens.method"
    assert all(name in caught.value.message for name in METHODS)


def test_every_method_and_preset_has_its_own_name() -> None:
    assert [find_method(name).name for name in METHODS] == list(METHODS)
    assert [preset.name for preset in PRESETS.values()] == list(PRESETS)


def test_methods_that_use_the_question_are_query_aware() -> None:
    """The KV key has the question for exactly these methods. A probe uses the question, too."""
    for method in METHODS.values():
        if method.kind == "encoder":
            assert method.query_aware == bool(method.needs & {"query", "probe"})


def test_presets_use_methods_for_text() -> None:
    assert {name: preset.keep for name, preset in PRESETS.items()} == {
        "document": 1,
        "general": 0.75,
        "fast": 0.5,
    }
    for preset in PRESETS.values():
        assert all(find_method(name).for_text for name in (preset.method, preset.fallback) if name)


def test_a_preset_has_a_fallback_for_models_that_do_not_support_its_method() -> None:
    encoder_methods = [name for name, method in METHODS.items() if method.kind == "encoder"]
    fast = [resolve_preset(VisualTokens("fast"), accepted) for accepted in (tuple(METHODS), encoder_methods)]
    assert fast == [VisualTokens("relevance", keep=0.5), VisualTokens("dpp", keep=0.5)]
    assert parse_visual_tokens("fast") == VisualTokens("fast"), "the preset stays: the model is not known yet"
    assert parse_visual_tokens("document") is None
    assert resolve_preset(VisualTokens("document")) is None
