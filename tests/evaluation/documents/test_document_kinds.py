"""Facts of documents: every kind makes facts that a question can ask about without doubt."""

from __future__ import annotations

import re
from random import Random

import pytest

from fovea.evaluation.documents.kinds import KINDS
from fovea.evaluation.documents.style import HELD_OUT_FONTS, TRAINING_FONTS, style

SEEDS = range(40)
COLOUR = re.compile(r"#[0-9a-f]{6}")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_fields_have_keys_and_labels_of_their_own(kind: str) -> None:
    for seed in SEEDS:
        fields = KINDS[kind](Random(seed)).fields
        for names in ([one.key for one in fields], [one.label for one in fields]):
            assert len(set(names)) == len(names), names
        assert all(one.value.strip() == one.value != "" for one in fields)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tables_are_rectangular_and_name_their_rows(kind: str) -> None:
    for seed in SEEDS:
        for table in KINDS[kind](Random(seed)).tables:
            assert table.rows
            assert {len(row) for row in table.rows} == {len(table.columns)}
            assert len({row[0] for row in table.rows}) == len(table.rows)
            assert len(set(table.columns)) == len(table.columns)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_equal_seeds_make_equal_facts(kind: str) -> None:
    content = KINDS[kind](Random(7))
    assert content == KINDS[kind](Random(7))
    assert content.kind == kind
    assert content.title


def test_a_chart_names_each_value_once() -> None:
    for seed in SEEDS:
        for series in KINDS["chart"](Random(seed)).series:
            names = [name for name, _ in series.values]
            assert len(set(names)) == len(names) >= 3
            assert all(re.search(r"\d", value) for _, value in series.values)


def test_no_font_is_both_trained_on_and_held_out() -> None:
    assert not set(TRAINING_FONTS) & set(HELD_OUT_FONTS)
    assert len(set(TRAINING_FONTS + HELD_OUT_FONTS)) == len(TRAINING_FONTS) + len(HELD_OUT_FONTS)


def test_styles_are_legible() -> None:
    for seed in SEEDS:
        look = style(Random(seed), TRAINING_FONTS)
        assert look == style(Random(seed), TRAINING_FONTS)
        assert look.font in TRAINING_FONTS
        assert look.display in TRAINING_FONTS
        assert look.size >= 14
        assert all(
            COLOUR.fullmatch(colour) for colour in (look.ink, look.paper, look.faint, look.accent, look.tint)
        )
        assert contrast(look.ink, look.paper) > 7
        assert contrast(look.faint, look.paper) > 2.5


def contrast(first: str, second: str) -> float:
    """The ratio of two colours' luminances as WCAG 2 defines it, 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    darker, lighter = sorted((luminance(first), luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)
