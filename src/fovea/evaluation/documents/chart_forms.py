"""The forms of charts: bars, lines and pies whose values are printed, or stand on labelled lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import cos, radians, sin
from random import Random
from typing import Any

from fovea.evaluation.documents.content import Series
from fovea.evaluation.documents.figure import Sheet
from fovea.evaluation.documents.kinds import KINDS


def on_lines(rng: Random, series: Series) -> tuple[Series, list[tuple[int, str]]]:
    """Move the values of a series to lines of a grid. Returns it with the lines and their labels."""
    step, unit = (
        rng.choice((1, 2, 5, 10, 20, 25, 50, 100, 500)),
        re.sub(r"^[\d.,' ]+", "", series.values[0][1]),
    )
    grouped = rng.choice((",", ".", " ", "'", ""))
    lines = [
        (step * index, f"{step * index:,}".replace(",", grouped) + unit)
        for index in range(rng.randint(5, 10) + 1)
    ]
    values = tuple((name, rng.choice(lines[1:])[1]) for name, _ in series.values)
    return Series(series.axis, values), lines


def _scale(sheet: Sheet, axis: str) -> bool:
    """Print values at bars, or move them to labelled lines. Returns whether they are to be printed."""
    limit = sheet.axes.set_xlim if axis == "x" else sheet.axes.set_ylim
    if sheet.rng.random() < 0.65:
        sheet.hide(axis)
        limit(0, max(sheet.numbers()) * 1.15)
        return True
    moved, lines = on_lines(sheet.rng, sheet.series)
    sheet.content = replace(sheet.content, series=(moved,))
    sheet.label(axis, [float(place) for place, _ in lines], [text for _, text in lines])
    sheet.axes.grid(axis=axis, color=sheet.look.faint, linewidth=0.8)
    sheet.axes.set_axisbelow(True)
    limit(0, lines[-1][0] * 1.02)
    return False


def _vertical(sheet: Sheet) -> None:
    printed = _scale(sheet, "y")
    places = [float(index) for index in range(len(sheet.names))]
    bars = sheet.axes.bar(
        places, sheet.numbers(), sheet.rng.uniform(0.4, 0.85), color=sheet.colours(len(places))
    )
    for index, bar in enumerate(bars):
        sheet.marks[f"bar:0:{index}"] = bar
        if printed:
            sheet.value(index, (index, sheet.numbers()[index]), (0, 3), ha="center", va="bottom")
    sheet.label("x", places, sheet.names)


def _horizontal(sheet: Sheet) -> None:
    printed = _scale(sheet, "x")
    places = [-float(index) for index in range(len(sheet.names))]
    bars = sheet.axes.barh(
        places, sheet.numbers(), sheet.rng.uniform(0.4, 0.8), color=sheet.colours(len(places))
    )
    for index, bar in enumerate(bars):
        sheet.marks[f"bar:0:{index}"] = bar
        if printed:
            sheet.value(index, (sheet.numbers()[index], -index), (4, 0), ha="left", va="center_baseline")
    sheet.label("y", places, sheet.names)


def _grouped(sheet: Sheet) -> None:
    """Two series side by side, with a legend of their names."""
    second = KINDS["chart"](sheet.rng).series[0]
    while second.axis == sheet.series.axis or len(second.values) < len(sheet.names):
        second = KINDS["chart"](sheet.rng).series[0]
    pairs = zip(sheet.names, second.values, strict=False)
    second = Series(second.axis, tuple((name, value) for name, (_, value) in pairs))
    sheet.content = replace(sheet.content, series=(sheet.series, second))
    width, highest = 0.38, max(sheet.numbers() + sheet.numbers(1))
    for series, colour in enumerate(sheet.palette(2)):
        places = [index + (series - 0.5) * width for index in range(len(sheet.names))]
        bars = sheet.axes.bar(
            places, sheet.numbers(series), width, color=colour, label=sheet.content.series[series].axis
        )
        for index, bar in enumerate(bars):
            sheet.marks[f"bar:{series}:{index}"] = bar
            where = (places[index], sheet.numbers(series)[index])
            sheet.value(index, where, (0, 3), series=series, ha="center", va="bottom")
    sheet.hide("y")
    sheet.label("x", [float(index) for index in range(len(sheet.names))], sheet.names)
    sheet.axes.set_ylim(0, highest * 1.12)
    _legend(sheet, sheet.axes.get_legend_handles_labels())


def _legend(sheet: Sheet, entries: tuple[list[Any], list[str]]) -> None:
    font, sheet.legend = sheet.font(), True
    legend = sheet.figure.legend(
        *entries, loc="outside lower center" if len(entries[1]) < 4 else "outside right upper",
        ncols=len(entries[1]) if len(entries[1]) < 4 else 1, frameon=False, labelcolor=font["color"],
        prop={name: font[name] for name in ("family", "size", "weight")},
    )  # fmt: skip
    for text in legend.get_texts():
        sheet.add(text)


def _line(sheet: Sheet) -> None:
    _points(sheet, area=False)


def _area(sheet: Sheet) -> None:
    _points(sheet, area=True)


def _points(sheet: Sheet, area: bool) -> None:
    """A line, or an area below it, with a value at each point."""
    places, values = [float(index) for index in range(len(sheet.names))], sheet.numbers()
    sheet.axes.plot(places, values, color=sheet.look.accent, linewidth=sheet.rng.uniform(1, 3))
    if area:
        sheet.axes.fill_between(places, values, color=sheet.look.tint)
    behind = {"facecolor": sheet.look.tint if area else sheet.look.paper, "edgecolor": "none", "pad": 0.5}
    for index, value in enumerate(values):
        (mark,) = sheet.axes.plot([index], [value], sheet.rng.choice("os"), color=sheet.look.accent)
        sheet.marks[f"bar:0:{index}"] = mark
        sheet.value(index, (index, value), (0, 7), ha="center", va="bottom", bbox=behind)
    sheet.hide("y")
    sheet.label("x", places, sheet.names)
    sheet.axes.set_ylim(0, max(values) * 1.2)
    sheet.axes.margins(x=0.1)


def _lollipop(sheet: Sheet) -> None:
    places, values = [float(index) for index in range(len(sheet.names))], sheet.numbers()
    for index, (value, colour) in enumerate(zip(values, sheet.colours(len(values)), strict=True)):
        (stem,) = sheet.axes.plot([index, index], [0, value], color=colour, linewidth=3)
        sheet.axes.plot([index], [value], "o", color=colour, markersize=11)
        sheet.marks[f"bar:0:{index}"] = stem
        sheet.value(index, (index, value), (0, 9), ha="center", va="bottom")
    sheet.hide("y")
    sheet.label("x", places, sheet.names)
    sheet.axes.set_ylim(0, max(values) * 1.15)
    sheet.axes.margins(x=0.1)


def _ranked(sheet: Sheet) -> None:
    """Thin bars with the names above them."""
    values = sheet.numbers()
    bars = sheet.axes.barh([-index for index in range(len(values))], values, 0.28, color=sheet.look.accent)
    for index, bar in enumerate(bars):
        sheet.marks[f"bar:0:{index}"] = bar
        sheet.value(index, (values[index], -index), (5, 0), ha="left", va="center_baseline")
        sheet.add(
            sheet.axes.annotate(sheet.names[index], (0, 0.2 - index), (1, 0), textcoords="offset points",
                                ha="left", va="bottom", **sheet.font())
        )  # fmt: skip
    sheet.hide("x")
    sheet.hide("y")
    sheet.axes.set_xlim(0, max(values) * 1.15)
    sheet.axes.set_ylim(0.5 - len(values), 0.8)


def _pie(sheet: Sheet) -> None:
    _slices(sheet, 1.0)


def _donut(sheet: Sheet) -> None:
    _slices(sheet, 0.45)


def _slices(sheet: Sheet, width: float) -> None:
    """Slices with values on them, and names beside them or in a legend."""
    options = {"width": width, "edgecolor": sheet.look.paper}
    while min(sheet.numbers()) * 16 < sum(sheet.numbers()) or sheet.series.values[0][1].endswith("%"):
        sheet.content = KINDS["chart"](sheet.rng)  # a thin slice has no room for its value
    named = sheet.rng.random() < 0.7
    slices, labels = sheet.axes.pie(
        sheet.numbers(), labels=sheet.names if named else None, colors=sheet.palette(len(sheet.names), 0.55),
        startangle=sheet.rng.randint(0, 90), counterclock=False, wedgeprops=options, textprops=sheet.font(),
    )[:2]  # fmt: skip
    for text in labels if named else ():
        sheet.add(text)
    for index, one in enumerate(slices):
        sheet.marks[f"bar:0:{index}"] = one
        middle = (one.theta1 + one.theta2) / 2
        across = _point(middle, 1 - width / 2 if width < 1 else 0.72)
        sheet.value(index, across, (0, 0), "#ffffff", ha="center", va="center")
    if not named:
        _legend(sheet, (list(slices), sheet.names))


def _point(degrees: float, radius: float) -> tuple[float, float]:
    """The point at an angle and a distance from the middle of a pie."""
    return radius * cos(radians(degrees)), radius * sin(radians(degrees))


TRAINING_FORMS: dict[str, Callable[[Sheet], None]] = {
    "vertical": _vertical, "horizontal": _horizontal, "grouped": _grouped, "line": _line, "pie": _pie,
}  # fmt: skip
HELD_OUT_FORMS: dict[str, Callable[[Sheet], None]] = {
    "lollipop": _lollipop, "ranked": _ranked, "area": _area, "donut": _donut,
}  # fmt: skip
ROUND = ("pie", "donut")
"""Forms whose marks have no rectangular shape."""
