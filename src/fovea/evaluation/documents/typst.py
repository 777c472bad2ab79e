"""Documents set by Typst, a renderer that no training page uses.

Each document is made twice: as the picture, and as a PDF from which the words and the facts' places are read.
A fact is a link in the document, `fovea://field:total`.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from functools import cache
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from fovea.core.errors import ConfigError
from fovea.evaluation.documents import vocabulary
from fovea.evaluation.documents.content import Content
from fovea.evaluation.documents.kinds import KINDS
from fovea.evaluation.documents.page import Page, faults, places_of
from fovea.evaluation.documents.pdf_words import read_words
from fovea.evaluation.documents.style import HELD_OUT_FONTS, Style, style

TEMPLATES = Path(__file__).with_name("templates") / "typst"
FONTS = "/usr/share/fonts"
POINTS_PER_INCH = 72
SIDE = 32
"""Pages are a multiple of this many pixels wide and high."""
LARGEST = 1344
SMALLEST = 13
"""Pixels of the smallest text."""
ATTEMPTS = 80


def typst_templates() -> tuple[str, ...]:
    """The names of the documents, such as "invoice_typst"."""
    return tuple(sorted(path.stem for path in TEMPLATES.glob("*_typst.typ")))


def draw_typst(rng: Random, template: str | None = None) -> Page:
    """A page of a random document, or of the one that is named, in a font that is kept from training.

    Raises ConfigError if the package typst or all of the fonts are missing. A page that is too high, or
    whose words overlap, is drawn anew with other facts.
    """
    name = template or rng.choice(typst_templates())
    installed = families()
    if not installed:
        raise ConfigError(f"none of the fonts for Typst is installed: {', '.join(HELD_OUT_FONTS)}")
    for _ in range(ATTEMPTS):
        content, look = KINDS[name.partition("_")[0]](rng), style(rng, installed)
        width, scale = SIDE * rng.randint(18, LARGEST // SIDE), rng.uniform(1.3, 2)
        values = _values(rng, content, look, width, scale)
        if page := _draw(name, content, look, values, scale):
            return page
    raise RuntimeError(f"document {name}: none of {ATTEMPTS} pages fits {LARGEST} pixels without faults")


@cache
def families() -> tuple[str, ...]:
    """The held-out families that Typst finds with an upright face of a normal weight."""
    faces = {
        face.family.lower()
        for face in _fonts().fonts()
        if face.style == "normal" and 350 <= face.weight <= 500
    }
    return tuple(family for family in HELD_OUT_FONTS if family.lower() in faces)


def _draw(name: str, content: Content, look: Style, values: dict[str, Any], scale: float) -> Page | None:
    compiler = _typst().Compiler(
        TEMPLATES / f"{name}.typ",
        root=TEMPLATES,
        font_paths=_fonts(),
        sys_inputs={"page": json.dumps(values)},
    )
    picture = compiler.compile(format="png", ppi=POINTS_PER_INCH * scale)
    if not isinstance(picture, bytes):  # a list: the document has several pages
        return None
    image = _padded(Image.open(io.BytesIO(picture)).convert("RGB"), look.paper)
    words = read_words(compiler.compile(format="pdf", pdf_tags=False), scale)
    if max(image.size) > LARGEST or faults(words, *image.size):
        return None
    return Page(f"{name}/{look.font}", name, look.font, image, content, words, places_of(words))


def _padded(image: Image.Image, paper: str) -> Image.Image:
    """The picture with paper added at the right and below, up to multiples of SIDE."""
    width, height = (-(-side // SIDE) * SIDE for side in image.size)
    padded = Image.new("RGB", (width, height), paper)
    padded.paste(image, (0, 0))
    return padded


def _values(rng: Random, content: Content, look: Style, width: int, scale: float) -> dict[str, Any]:
    """All that a document is made of. Lengths are in points; `scale` is the number of pixels in a point."""
    size = max(look.size, SMALLEST + 1) / scale
    lengths = {
        "width": width / scale,
        "margin": look.pad / scale + 8,
        "size": size,
        "small": max(SMALLEST / scale, size * 0.82),
        "leading": (look.line - 1) * 0.8 + 0.45,
        "radius": look.radius,
    }
    filler = [f"{vocabulary.sentence(rng)} {vocabulary.company(rng)}" for _ in range(3)]
    ticks = [
        {"label": vocabulary.name(rng), "on": rng.random() < 0.5} for _ in range(3)
    ]  # boxes of a form, which no question is about
    return {
        "doc": asdict(content),
        "look": asdict(look) | lengths,
        "filler": filler,
        "ticks": ticks,
        "address": f"{vocabulary.street(rng)}, {vocabulary.city(rng)}",
        "signed": vocabulary.person(rng),
    }


def _typst() -> Any:
    try:
        return import_module("typst")
    except ModuleNotFoundError as error:
        raise ConfigError("these documents are set by Typst: pip install typst") from error


@cache
def _fonts() -> Any:
    return _typst().Fonts(font_paths=[FONTS])
