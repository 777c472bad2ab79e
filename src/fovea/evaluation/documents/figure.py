"""A figure of matplotlib without a window, the sheet on which a chart is drawn, and the places of its words.

Fonts are set without hinting, so that the places of characters are their advances.
"""

from __future__ import annotations

import colorsys
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from fovea.core.errors import ConfigError
from fovea.evaluation.documents.content import Content, Series
from fovea.evaluation.documents.page import Box, Word
from fovea.evaluation.documents.style import Style

DPI = 100
SETTINGS = {"text.hinting": "none", "text.parse_math": False, "axes.unicode_minus": False}
PROBE = "n"


def matplotlib() -> Any:
    """The package. Raises ConfigError if it is missing."""
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure
        import matplotlib.font_manager as fonts
    except ModuleNotFoundError as error:
        raise ConfigError("charts are drawn by matplotlib: pip install matplotlib") from error
    assert fonts is not None
    return matplotlib


@cache
def _fonts() -> Any:
    """matplotlib's fonts, with those that were installed after it wrote its list."""
    manager = matplotlib().font_manager
    listed = {entry.fname for entry in manager.fontManager.ttflist}
    for file in manager.findSystemFonts():
        if file not in listed:
            with suppress(RuntimeError):  # a font that FreeType cannot read, such as one of coloured pictures
                manager.fontManager.addfont(file)
    return manager


@cache
def font_file(family: str) -> str | None:
    """The file of a family that can be drawn; None if there is none.

    Files that matplotlib takes for upright and are not, and those with bitmaps for small sizes, which it
    draws wrongly, are none.
    """
    manager = _fonts()
    try:
        wanted = manager.FontProperties(family=family, weight=weights(family)[0])
        file = str(manager.findfont(wanted, fallback_to_default=False))
    except ValueError:
        return None
    font = manager.get_font(file)
    return None if "Italic" in font.style_name or font.num_fixed_sizes else file


@cache
def _known(file: str) -> frozenset[int]:
    return frozenset(matplotlib().font_manager.get_font(file).get_charmap())


@cache
def weights(family: str) -> tuple[int, int]:
    """The family's weights that are nearest to normal and to bold, as numbers of CSS."""
    names = _fonts().weight_dict
    known = {
        int(names.get(entry.weight, entry.weight))
        for entry in _fonts().fontManager.ttflist
        if entry.name == family and entry.style == "normal"
    }
    normal = min(known, key=lambda weight: abs(weight - 400), default=400)
    return normal, min(known, key=lambda weight: abs(weight - 700), default=normal)


def has_characters(family: str, text: str) -> bool:
    """Tell whether the family is installed and has all characters of the text, white space aside."""
    file = font_file(family)
    return file is not None and {ord(sign) for sign in text if not sign.isspace()} <= _known(file)


def points(pixels: float) -> float:
    """A font size in points."""
    return pixels * 72 / DPI


def blank(rng: Random, paper: str) -> Any:
    """An empty figure with sides of 448 to 960 pixels, both multiples of 32."""
    module = matplotlib()
    size = tuple(32 * rng.randint(14, 30) / DPI for _ in range(2))
    made = module.figure.Figure(figsize=size, dpi=DPI, facecolor=paper, layout="constrained")
    module.backends.backend_agg.FigureCanvasAgg(made)
    return made


def picture(figure: Any) -> Image.Image:
    """Draw the figure."""
    figure.canvas.draw()
    return Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3].copy())


def words_of(figure: Any, texts: Iterable[tuple[Any, str]]) -> tuple[Word, ...]:
    """The words of texts of a drawn figure. texts: each with the name of its fact, or ""."""
    return tuple(word for text, at in texts for word in _words(figure, text, at))


def box_of(figure: Any, artist: Any) -> Box:
    """The place of a drawn bar, point or text, in pixels of the page."""
    extent = artist.get_window_extent(figure.canvas.get_renderer())
    height = figure.bbox.height
    return (float(extent.x0), float(height - extent.y1), float(extent.x1), float(height - extent.y0))


def _words(figure: Any, artist: Any, at: str) -> Iterator[Word]:
    text, properties = artist.get_text(), artist.get_fontproperties()
    renderer = figure.canvas.get_renderer()

    def width(part: str) -> float:
        return float(renderer.get_text_width_height_descent(part, properties, False)[0])

    left, top, _, bottom = box_of(figure, artist)
    probe = width(PROBE)
    # The width of a text ends at the ink of its last character. With a letter behind it, it has the
    # whole advance.
    advance = [0.0, *(width(text[:end] + PROBE) - probe for end in range(1, len(text) + 1))]
    for match in re.finditer(r"\S+", text):
        starts = tuple(left + advance[index] for index in range(*match.span()))
        yield Word(match[0], (starts[0], top, left + advance[match.end()], bottom), starts, at)


@dataclass(slots=True)
class Sheet:
    """A chart while it is drawn.

    texts: each text with the name of its fact, or "".
    marks: the bar, point or slice of each fact.
    size: of the text, in pixels.
    legend: whether the figure has one, below or at the right.
    """

    rng: Random
    look: Style
    content: Content
    figure: Any
    axes: Any
    size: int
    texts: list[tuple[Any, str]] = field(default_factory=list)
    marks: dict[str, Any] = field(default_factory=dict)
    legend: bool = False

    @property
    def series(self) -> Series:
        return self.content.series[0]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.series.values]

    def numbers(self, index: int = 0) -> list[int]:
        return [number(value) for _, value in self.content.series[index].values]

    def font(self, pixels: float = 0.0, colour: str = "", bold: bool = False) -> dict[str, Any]:
        """Arguments of a text. pixels: its size; as the sheet's if 0."""
        return {
            "weight": weights(self.look.font)[bold],
            "family": self.look.font,
            "size": points(pixels or self.size),
            "color": colour or self.look.ink,
        }

    def add(self, text: Any, at: str = "") -> None:
        self.texts.append((text, at))

    def value(self, index: int, where: tuple[float, float], shift: tuple[float, float], colour: str = "",
              series: int = 0, **options: Any) -> None:  # fmt: skip
        """Print a value. where: in units of the axes. shift: from there, in points."""
        text = self.content.series[series].values[index][1]
        self.add(
            self.axes.annotate(
                text, where, shift, textcoords="offset points", **self.font(0, colour), **options
            ),
            f"bar:{series}:{index}",
        )

    def label(self, axis: str, places: list[float], texts: list[str]) -> None:
        """Label the ticks of an axis, "x" or "y"."""
        getattr(self.axes, f"set_{axis}ticks")(places, labels=texts, **self.font())
        for tick in getattr(self.axes, f"get_{axis}ticklabels")():
            self.add(tick)

    def hide(self, axis: str) -> None:
        getattr(self.axes, f"set_{axis}ticks")([])

    def colours(self, count: int, light: float = 0.75) -> list[str]:
        """One colour for all, or one for each."""
        if self.rng.random() < 0.5:
            return [self.look.accent] * count
        return self.palette(count, light)

    def palette(self, count: int, light: float = 0.75) -> list[str]:
        """Colours that differ."""
        start, share = self.rng.random(), self.rng.uniform(0.4, 0.9)
        hues = [start + index / count for index in range(count)]
        return [
            "#" + "".join(f"{int(part * 255):02x}" for part in colorsys.hsv_to_rgb(hue % 1, share, light))
            for hue in hues
        ]


def number(text: str) -> int:
    """The number that a printed value means: "1,200 k" is 1200."""
    return int(re.sub(r"\D", "", text))
