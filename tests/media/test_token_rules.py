"""OpenAI's rule for tiles, with the examples of its guide, and the estimate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.core.errors import ConfigError, InvalidImage, InvalidRequest
from fovea.media.token_rules import RULES, Estimate, OpenAITiles, estimate_rule

SIDES = st.integers(1, 20_000)


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [
        (1024, 1024, 765),
        (2048, 4096, 1105),
        (4096, 2048, 1105),
        (512, 512, 255),
        (513, 512, 425),
        (513, 513, 765),
        (1, 1, 255),
        (768, 1536, 1105),
        (20_000, 1, 85 + 4 * 170),
    ],
)
def test_examples_of_tiles(width: int, height: int, tokens: int) -> None:
    assert OpenAITiles().tokens(width, height) == tokens
    assert OpenAITiles().tokens(width, height, detail="high") == tokens


def test_low_detail_is_the_base() -> None:
    assert OpenAITiles().tokens(4096, 8192, detail="low") == 85
    assert OpenAITiles(base=70, tile=140).tokens(4096, 8192, detail="low") == 70


@given(SIDES, SIDES)
def test_tiles_are_few_and_do_not_depend_on_orientation(width: int, height: int) -> None:
    rule = OpenAITiles(base=0, tile=1)
    tiles = rule.tokens(width, height)
    assert tiles == rule.tokens(height, width)
    assert 1 <= tiles <= 8, "at most 2048 x 768 pixels"
    # The same in floating-point numbers, where they are exact enough to tell.
    scale = min(1.0, 2048 / max(width, height))
    scale = min(scale, 768 / min(width, height))
    sides = [side * scale / 512 for side in (width, height)]
    if all(abs(side - round(side)) > 1e-9 for side in sides):
        assert tiles == (int(sides[0]) + 1) * (int(sides[1]) + 1)


def test_what_openai_refuses() -> None:
    with pytest.raises(InvalidRequest, match="detail is 'medium'; accepted: auto, low, high"):
        OpenAITiles().tokens(10, 10, detail="medium")
    with pytest.raises(InvalidImage, match="it is 0x10 pixels"):
        OpenAITiles().tokens(0, 10)


@given(SIDES, SIDES)
def test_the_estimate_follows_the_area_within_its_limits(width: int, height: int) -> None:
    tokens = estimate_rule(1000, low=10, high=5000).tokens(width, height)
    assert 10 <= tokens <= 5000
    assert tokens in (10, 5000) or 0 <= tokens * 1000 - width * height < 1000


def test_bounds_of_the_client_limit_the_estimated_area() -> None:
    rule = estimate_rule()
    assert rule.tokens(2800, 2800) == 10_000
    assert rule.tokens(2800, 2800, max_pixels=28 * 28 * 100) == 100
    assert rule.tokens(28, 28, min_pixels=28 * 28 * 100) == 100
    assert rule.tokens(28, 28, detail="low") == 4
    with pytest.raises(InvalidImage):
        rule.tokens(10, 0)


@pytest.mark.parametrize("values", [(0, 1, 2), (1, 0, 2), (1, 3, 2)])
def test_limits_of_the_estimate_are_checked(values: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="accepted"):
        estimate_rule(values[0], low=values[1], high=values[2])


def test_rules_have_the_names_by_which_they_are_chosen() -> None:
    assert {name: build().name for name, build in RULES.items()} == {name: name for name in RULES}
    assert RULES["estimate"]() == Estimate(784, 4, 16384)
