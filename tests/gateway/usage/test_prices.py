"""Prices: exact costs, credits that add up, and errors that name the wrong value."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.core.config_files import parse_toml
from fovea.core.errors import ConfigError
from fovea.gateway.usage.prices import Consumption, PriceTable, prices_of, read_prices

TABLE = """
currency = "EUR"
[default]
text_input = 0.5
output = 2
["a/b.c"]
text_input = 0.40
visual_input = 0.30
cached_input = 0.10
output = 1.60
image = 0.0001
request = 0.00002
cached_response = 0.1
[share]
text_input = 1
visual_input = 0.333333
cached_share = 0.25
"""
COUNTS = st.integers(0, 10**7)


def parse_prices(text: str) -> PriceTable:
    return prices_of(parse_toml(text, "the table", parse_float=Decimal))


def test_the_cost_of_a_request() -> None:
    table = parse_prices(TABLE)
    assert table.currency == "EUR"
    used = Consumption(prompt_tokens=1500, visual_tokens=1000, completion_tokens=100, images=2)
    # 500 * 0.4 + 1000 * 0.3 + 100 * 1.6 + 2 images * 100 + 20
    assert table.price("a/b.c", used) == (880, 0, 500, False)
    assert table.cost("a/b.c", used) == 880
    assert table.cost("another", used) == 1500 * 0.5 + 100 * 2
    assert parse_prices("").price("any", used) == (0, 0, 0, False)


def test_cached_tokens_are_a_credit() -> None:
    table = parse_prices(TABLE)
    used = Consumption(
        prompt_tokens=1500, visual_tokens=1000, cached_tokens=300, completion_tokens=100, images=2
    )
    # of 300 cached tokens, 200 are visual: 100 * (0.4 - 0.1) + 200 * (0.3 - 0.1)
    assert table.price("a/b.c", used) == (880 - 70, 70, 460, False)
    assert table.price("share", Consumption(1000, 0, 1000)) == (250, 750, 0, False)
    assert table.price("another", Consumption(1000, 0, 500)) == (375, 125, 0, False), (
        "half, if nothing is said"
    )


def test_answers_from_the_response_cache_cost_a_share() -> None:
    table = parse_prices(TABLE)
    used = Consumption(prompt_tokens=1500, visual_tokens=1000, completion_tokens=100, images=2)
    assert table.price("a/b.c", used, cached_response=True) == (88, 792, 50, False)
    assert table.price("share", used, cached_response=True) == (0, 1034, 0, False)


def test_an_estimate_is_marked() -> None:
    used = Consumption(prompt_tokens=10, estimated=True)
    assert parse_prices(TABLE).price("a/b.c", used).estimated


@given(
    COUNTS,
    COUNTS,
    COUNTS,
    COUNTS,
    st.integers(0, 100),
    st.booleans(),
    st.sampled_from(["a/b.c", "share", "x"]),
)
def test_costs_are_exact_and_rounded_up_once(
    text: int, visual: int, cached: int, output: int, images: int, hit: bool, model: str
) -> None:
    """Compare with the same formula in fractions, which is the naive twin."""
    prompt = text + visual
    cached = min(cached, prompt)
    used = Consumption(prompt, visual, cached, output, images)
    price = parse_prices(TABLE).price(model, used, cached_response=hit)
    rates = {
        "a/b.c": ("0.4", "0.3", "0.1", "0.1", "1.6", "100", "20", "0.1"),
        "share": ("1", "0.333333", "0.25", "0.08333325", "2", "0", "0", "0"),
        "x": ("0.5", "0.5", "0.25", "0.25", "2", "0", "0", "0"),
    }
    t, v, ct, cv, out, image, request, share = map(Fraction, rates[model])
    cached_visual = cached * visual // prompt if prompt else 0
    full = text * t + visual * v + output * out + images * image + request
    net = full - cached_visual * (v - cv) - (cached - cached_visual) * (t - ct)
    assert price.cost == ceil(net * share if hit else net)
    assert price.cost + price.credit == ceil(full)
    assert 0 <= price.visual <= price.cost


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\ntext_input = -1", "[a]: text_input is -1; accepted: 0 to 1,000,000, with at most 6 decimals"),
        ("[a]\noutput = 0.1234567", "[a]: output is 0.1234567; accepted"),
        ("[a]\noutput = nan", "[a]: output is NaN"),
        ("[a]\noutput = true", "[a]: output is True"),
        ("[a]\noutput = '1'", "[a]: output is '1'"),
        ("[a]\ncached_share = 1.5", "[a]: cached_share is 1.5; accepted: 0 to 1,"),
        ("[a]\ntext_imput = 1", "[a]: unknown key 'text_imput'; did you mean 'text_input'?"),
        ("[qwen2.5]\noutput = 1", "a model's name with a dot needs quotes"),
        ("[a]\ncached_share = 1\ncached_input = 1", "accepted: cached_input or cached_share"),
        (
            "[a]\ntext_input = 1\nvisual_input = 0.1\ncached_input = 0.5",
            "cached_input is 0.5; accepted: at most",
        ),
        ("currency = 'euro'", "currency is 'euro'; accepted: three letters, as EUR"),
        ("output = 1", "'output' is not a table"),
        ("[a", "is not TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as wrong:
        read_prices(path)
    assert message in wrong.value.message
    assert str(path) in wrong.value.message


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_prices(tmp_path / "none.toml")
