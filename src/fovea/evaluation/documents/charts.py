"""Pages with one chart, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from fovea.core.errors import ConfigError
from fovea.evaluation.documents import figure as fig
from fovea.evaluation.documents import vocabulary
from fovea.evaluation.documents.chart_forms import HELD_OUT_FORMS, ROUND, TRAINING_FORMS
from fovea.evaluation.documents.kinds import KINDS
from fovea.evaluation.documents.page import Box, Page, bounds, faults, places_of
from fovea.evaluation.documents.style import HELD_OUT_FONTS, TRAINING_FONTS, Style, style

ATTEMPTS = 200
SMALLEST = 13
"""Pixels of the smallest text."""
LARGEST = 20


def draw_chart(rng: Random, held_out: bool, form: str = "") -> Page:
    """A page with one chart.

    held_out: whether form and font are those that are kept from training. form: a key of TRAINING_FORMS or
    HELD_OUT_FORMS; drawn at random if empty. A chart whose words overlap is drawn anew with other facts.
    Raises ConfigError if matplotlib or all of the fonts are missing.
    """
    forms, fonts = (HELD_OUT_FORMS, HELD_OUT_FONTS) if held_out else (TRAINING_FORMS, TRAINING_FONTS)
    installed = tuple(family for family in fonts if fig.font_file(family))
    if not installed:
        raise ConfigError(f"none of the fonts for charts is installed: {', '.join(fonts)}")
    name = form or rng.choice(tuple(forms))
    with fig.matplotlib().rc_context(fig.SETTINGS):
        for _ in range(ATTEMPTS):
            if page := _attempt(rng, name, forms[name], style(rng, installed)):
                return page
    raise RuntimeError(f"no chart of the form {name} without overlapping words in {ATTEMPTS} attempts")


def _attempt(rng: Random, name: str, form: Callable[[fig.Sheet], None], look: Style) -> Page | None:
    figure = fig.blank(rng, look.paper)
    size = min(LARGEST, max(SMALLEST, look.size - rng.choice((0, 2, 4))))
    sheet = fig.Sheet(rng, look, KINDS["chart"](rng), figure, figure.add_subplot(facecolor=look.paper), size)
    if look.paper < "#8":  # a dark page
        sheet.look = replace(look, accent=sheet.palette(1, 0.8)[0])
    form(sheet)
    _frame(sheet)
    if not fig.has_characters(look.font, "".join(text.get_text() for text, _ in sheet.texts)):
        return None
    image = fig.picture(figure)
    words = fig.words_of(figure, sheet.texts)
    if faults(words, *image.size):
        return None
    places, marks = places_of(words), {at: fig.box_of(figure, mark) for at, mark in sheet.marks.items()}
    if name not in ROUND and any(_cover(marks, at, place) for at, place in places.items()):
        return None
    for at, box in marks.items():
        places[at] = bounds([box, places[at]]) if at in places else box
    return Page(f"chart_{name}/{look.font}", f"chart_{name}", look.font, image, sheet.content, words, places)


def _cover(marks: dict[str, Box], at: str, text: Box) -> bool:
    """Tell whether a printed value touches the bar or point of another value."""
    return any(
        mark[0] < text[2] and text[0] < mark[2] and mark[1] < text[3] and text[1] < mark[3]
        for other, mark in marks.items()
        if other != at
    )


def _frame(sheet: fig.Sheet) -> None:
    """The title, the name of the axis, the lines around the chart, and a note below it."""
    rng, look, axes = sheet.rng, sheet.look, sheet.axes
    left = rng.random() < 0.5
    title = sheet.figure.suptitle(
        sheet.content.title, x=0.02 if left else 0.5, ha="left" if left else "center",
        **sheet.font(min(30, sheet.size * rng.choice((1.2, 1.4, 1.6))), bold=rng.random() < 0.5),
    )  # fmt: skip
    sheet.texts.insert(0, (title, "title"))
    if len(sheet.content.series) == 1:
        sheet.add(axes.set_title(sheet.series.axis, loc="left", **sheet.font(0, look.faint)))
    for side in rng.choice(
        (("top", "right"), ("top", "right", "left"), ("top", "right", "left", "bottom"), ())
    ):
        axes.spines[side].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(look.faint)
    axes.tick_params(length=0)
    if rng.random() < 0.4 and not sheet.legend:
        note = f"{vocabulary.sentence(rng, 3, 6)} {vocabulary.company(rng)}"
        sheet.add(sheet.figure.supxlabel(note, x=0.02, ha="left", **sheet.font(SMALLEST, look.faint)))
