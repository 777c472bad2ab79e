"""The look of an HTML page: fonts, sizes and colours, drawn at random for every page."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from random import Random

TRAINING_FONTS = (
    "Liberation Sans", "Liberation Serif", "Liberation Mono", "DejaVu Sans", "DejaVu Serif",
    "DejaVu Sans Mono", "Roboto", "Roboto Condensed", "Roboto Slab", "Lato", "Cantarell", "Caladea",
    "FreeSans", "FreeSerif", "FreeMono", "Inter", "Fira Code", "Hack", "JetBrains Mono",
    "Linux Libertine O", "Linux Biolinum O", "Play", "Quicksand", "Comfortaa", "Charis SIL", "Andika",
    "Anonymous Pro", "Inconsolata", "TeX Gyre Adventor", "TeX Gyre Bonum", "TeX Gyre Heros",
    "TeX Gyre Pagella", "TeX Gyre Schola", "TeX Gyre Cursor", "Dosis", "Karla", "B612",
    "Fantasque Sans Mono", "OCR B", "Jura", "Tuffy", "Yanone Kaffeesatz", "Junicode Two Beta",
)  # fmt: skip
"""Families of Debian's font packages (see docs/documents.md) that training pages are set in."""
HELD_OUT_FONTS = (
    "Open Sans", "EB Garamond", "Cabin", "Clear Sans", "Go", "Vollkorn", "Courier Prime", "mononoki",
)  # fmt: skip
"""Families that no training page is set in, and none of whose relatives is among the training fonts."""


@dataclass(frozen=True, slots=True)
class Style:
    """Values that every template uses.

    font, display: families of the text and of headings.
    size: of the text, in pixels. line: height of a line, as a multiple of it. pad: of the page, in pixels.
    ink, paper, faint, accent, on_accent, tint: colours of the text, the page, lines and small print, and
        of coloured areas; `tint` is a light area on the page.
    rule: CSS of a line. radius: of corners, in pixels.
    caps: whether labels are in capitals. colon: what follows a label. weight: of labels and headers.
    stripes: whether table rows alternate. align: of the numbers in tables. flip: mirrors some layouts.
    """

    font: str
    display: str
    size: int
    line: float
    pad: int
    ink: str
    paper: str
    faint: str
    accent: str
    on_accent: str
    tint: str
    rule: str
    radius: int
    caps: bool
    colon: str
    weight: int
    stripes: bool
    align: str
    flip: bool
    gap: int


def style(rng: Random, fonts: tuple[str, ...], smallest: int = 14) -> Style:
    """A random look. smallest: of the text sizes, in pixels."""
    font = rng.choice(fonts)
    dark = rng.random() < 0.12
    hue = rng.random()
    accent = _rgb(hue, rng.uniform(0.3, 0.9), rng.uniform(0.25, 0.7))
    if dark:
        ink, paper = (
            _rgb(hue, 0.1, rng.uniform(0.85, 1)),
            _rgb(hue, rng.uniform(0, 0.4), rng.uniform(0.05, 0.2)),
        )
        faint, tint = _rgb(hue, 0.1, 0.6), _rgb(hue, 0.3, 0.27)
    else:
        ink = _rgb(hue, rng.uniform(0, 0.5), rng.uniform(0, 0.25))
        paper = (
            "#ffffff"
            if rng.random() < 0.6
            else _rgb(rng.random(), rng.uniform(0, 0.08), rng.uniform(0.93, 1))
        )
        faint, tint = (
            _rgb(hue, 0.1, rng.uniform(0.35, 0.6)),
            _rgb(hue, rng.uniform(0.02, 0.12), rng.uniform(0.9, 0.97)),
        )
    width = rng.choice((1, 1, 2))
    return Style(
        font=font,
        display=font if rng.random() < 0.6 else rng.choice(fonts),
        size=rng.choice((smallest, smallest + 1, 16, 16, 17, 18, 18, 20, 22, 25)),
        line=rng.choice((1.15, 1.25, 1.35, 1.5, 1.7)),
        pad=rng.choice((12, 20, 28, 40, 56)),
        ink=ink,
        paper=paper,
        faint=faint,
        accent=accent,
        on_accent="#ffffff",
        tint=tint,
        rule=f"{width}px {rng.choice(('solid', 'solid', 'dashed', 'dotted'))} {faint}",
        radius=rng.choice((0, 0, 4, 10)),
        caps=rng.random() < 0.15,
        colon=rng.choice(("", "", ":", ":", " :")),
        weight=rng.choice((400, 600, 700)),
        stripes=rng.random() < 0.4,
        align=rng.choice(("right", "right", "left", "center")),
        flip=rng.random() < 0.5,
        gap=rng.choice((4, 8, 12, 18)),
    )


def _rgb(hue: float, saturation: float, value: float) -> str:
    red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"
