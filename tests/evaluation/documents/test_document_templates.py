"""Templates of pages: each shows every fact of its kind exactly once, in text that is large enough."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from random import Random

import pytest
from jinja2 import Environment
from tests.evaluation.documents.support import facts

from fovea.evaluation.documents.charts import HELD_OUT_FORMS, TRAINING_FORMS
from fovea.evaluation.documents.chromium import environment, helpers, templates
from fovea.evaluation.documents.kinds import KINDS
from fovea.evaluation.documents.style import TRAINING_FONTS, style
from fovea.evaluation.documents.typst import typst_templates

SEEDS = range(12)
SMALLEST = 13
ALL = [(False, name) for name in templates(False)] + [(True, name) for name in templates(True)]


@cache
def jinja(held_out: bool) -> Environment:
    return environment(held_out)


def pages(held_out: bool, name: str):
    """The content and the HTML of some pages of a template."""
    template = jinja(held_out).get_template(f"{name}.html")
    for seed in SEEDS:
        rng = Random(f"{name}/{seed}")
        look, content = style(rng, TRAINING_FONTS), KINDS[name.partition("_")[0]](rng)
        yield content, template.render(doc=content, s=look, rng=rng, **helpers(content, rng))


@pytest.mark.parametrize(("held_out", "name"), ALL)
def test_every_fact_is_marked_once(held_out: bool, name: str) -> None:
    for content, html in pages(held_out, name):
        marks = Counter(re.findall(r'data-at="([^"]+)"', html))
        assert marks == dict.fromkeys(facts(content), 1)


@pytest.mark.parametrize(("held_out", "name"), ALL)
def test_labels_and_headers_are_shown(held_out: bool, name: str) -> None:
    for content, html in pages(held_out, name):
        texts = {text.strip().rstrip(":").strip() for text in re.findall(r">([^<>]+)<", html)}
        labels = {one.label for one in content.fields}
        headers = {header for table in content.tables for header in table.columns}
        assert labels | headers <= texts, (labels | headers) - texts


@pytest.mark.parametrize(("held_out", "name"), ALL)
def test_no_text_is_too_small(held_out: bool, name: str) -> None:
    for _, html in pages(held_out, name):
        sizes = re.findall(r"font(?:-size)?:\s*([\d.]+)(px|em)", html)
        assert all(float(size) >= (SMALLEST if unit == "px" else 1) for size, unit in sizes), sizes


def test_no_template_is_both_trained_on_and_held_out() -> None:
    names = [*templates(False), *templates(True), *typst_templates()]
    forms = [*TRAINING_FORMS, *HELD_OUT_FORMS]
    assert len(set(names)) == len(names)
    assert len(set(forms)) == len(forms)


def test_every_kind_has_a_training_template() -> None:
    kinds = {name.partition("_")[0] for name in templates(False)}
    assert kinds == set(KINDS) - {"chart"}  # charts are drawn without templates
    assert {name.partition("_")[0] for name in templates(True)} < kinds
