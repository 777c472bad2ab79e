"""Renderers of pages: the words that they report are the facts, and stand where the ink is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from tests.evaluation.documents.support import facts, in_order, printed
from tests.support.servers import program

from fovea.core.errors import ConfigError
from fovea.evaluation.documents import chromium, figure, typst
from fovea.evaluation.documents.chart_forms import on_lines
from fovea.evaluation.documents.charts import TRAINING_FORMS, draw_chart
from fovea.evaluation.documents.kinds import KINDS
from fovea.evaluation.documents.page import Page
from fovea.evaluation.documents.pdf_words import read_words


def check_page(page: Page) -> None:
    assert printed(page) == facts(page.content)
    assert in_order(page)
    assert all(side % 32 == 0 and side <= 1344 for side in page.image.size)


def test_chromium_draws_a_page() -> None:
    program("chromium")
    with chromium.browser(False) as renderer:
        check_page(renderer.draw(Random(5), "invoice_sidebar"))


def test_broken_words_and_overlaps_are_faults_and_hidden_words_are_left_out() -> None:
    """Receipts without headers once reported the hidden headers at the page's corner, one on the other."""
    from tests.page.support import chromium as started

    corner = "<p style='position:absolute; left:0; top:0'>"
    pages = {
        "<p style='display:none'>gone</p><p>here</p>": (["here"], 0),
        "<p style='width:3em; overflow-wrap:anywhere'>unbreakable</p>": (None, 1),
        f"{corner}one</p>{corner}two</p>": (["one", "two"], 1),
    }
    with started() as browser:
        tab = browser.new_page()
        for html, (texts, count) in pages.items():
            tab.set_content(f"<body style='overflow:hidden'>{html}")
            words, _, _, faults = tab.evaluate(chromium.READ_WORDS)
            assert faults == count
            assert texts is None or [word[0] for word in words] == texts


@pytest.mark.parametrize("form", TRAINING_FORMS)
def test_charts_show_their_values(form: str) -> None:
    for seed in range(3):
        page = draw_chart(Random(seed), False, form)
        content = page.content
        values = {
            f"bar:{number}:{index}": value
            for number, series in enumerate(content.series)
            for index, (_, value) in enumerate(series.values)
        }
        texts = printed(page)
        assert set(page.places) == {"title", *values}
        assert texts["title"] == content.title
        assert {at: text for at, text in texts.items() if text} in (
            {"title": content.title} | values,
            {"title": content.title},  # the values stand on labelled lines
        )
        shown = {word.text for word in page.words}
        assert all(set(name.split()) <= shown for series in content.series for name, _ in series.values)
        assert in_order(page)
        assert all(448 <= side <= 960 and side % 32 == 0 for side in page.image.size)


def test_higher_values_have_higher_bars() -> None:
    page = draw_chart(Random(1), False, "vertical")
    values = [figure.number(value) for _, value in page.content.series[0].values]
    tops = [-page.places[f"bar:0:{index}"][1] for index in range(len(values))]
    assert len(set(values)) > 1
    assert np.argsort(values, stable=True).tolist() == np.argsort(np.round(tops), stable=True).tolist()


def test_values_on_lines_are_labels_of_lines() -> None:
    for seed in range(20):
        series, lines = on_lines(Random(seed), KINDS["chart"](Random(seed)).series[0])
        steps = np.diff([place for place, _ in lines])
        assert len(set(steps)) == 1
        assert [figure.number(text) for _, text in lines] == [place for place, _ in lines]
        assert {value for _, value in series.values} <= {text for _, text in lines[1:]}


def test_characters_of_a_chart_stand_where_their_ink_is() -> None:
    """The letter H has ink at the same distance from its start, whatever stands before it."""
    with figure.matplotlib().rc_context(figure.SETTINGS):
        sheet = figure.blank(Random(0), "#ffffff")
        text = sheet.text(0.05, 0.5, "H iiiiH WWWH mlH .,:;H", family="DejaVu Sans", size=figure.points(16))
        image = np.asarray(figure.picture(sheet).convert("L"))
        words = figure.words_of(sheet, [(text, "")])
    distances = []
    for one in words:
        assert one.text.endswith("H")
        top, bottom, left = round(one.box[1]), round(one.box[3]), one.starts[-1]
        ink = np.flatnonzero((image[top:bottom, round(left) : round(left) + 10] < 128).any(0))
        distances.append(round(left) + ink[0] - left)
    assert max(distances) - min(distances) <= 1
    assert 0 <= min(distances) <= 3


@pytest.mark.parametrize("name", typst.typst_templates())
def test_typst_sets_a_document(name: str) -> None:
    pytest.importorskip("typst")
    check_page(typst.draw_typst(Random(5), name))


@pytest.mark.parametrize(
    ("module", "draw"),
    [
        ("matplotlib.figure", lambda: draw_chart(Random(0), False)),
        ("typst", lambda: typst.draw_typst(Random(0))),
        ("pypdfium2", lambda: read_words(b"", 1)),
    ],
    ids=["matplotlib", "typst", "pypdfium2"],
)
def test_a_missing_package_is_named(
    module: str, draw: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for cached in (figure.font_file, figure._fonts, typst._fonts, typst.families):
        cached.cache_clear()
    with pytest.raises(ConfigError, match=f"pip install {module.partition('.')[0]}"):
        draw()
