"""The fonts of labels: subsets that ship with the package, and Pillow's own font."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

FOLDER = Path(__file__).parent.parent / "fonts"
PILLOW = "pillow"
FONTS: tuple[str, ...] = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono", PILLOW)


def _load(name: str, size: int) -> ImageFont.FreeTypeFont:
    if name == PILLOW:
        font = ImageFont.load_default(size)
        if not isinstance(font, ImageFont.FreeTypeFont):
            raise RuntimeError("this Pillow lacks FreeType")
        return font
    return ImageFont.truetype(FOLDER / f"{name}.ttf", size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=512)
def font(name: str, height: int) -> ImageFont.FreeTypeFont:
    """The font in the smallest size at which a capital H is at least `height` pixels high. Cached."""
    size = height
    while True:
        candidate = _load(name, size)
        if -candidate.getbbox("H", anchor="ls")[1] >= height:
            return candidate
        size += 1


@lru_cache(maxsize=65536)
def advance(name: str, height: int, character: str) -> float:
    """Pixels from the start of this character to the start of the next, without tracking."""
    return font(name, height).getlength(character)


@lru_cache(maxsize=65536)
def ink(name: str, height: int, character: str) -> tuple[float, float, float, float]:
    """Box of a character's drawn pixels, (left, top, right, bottom), from its start on the baseline."""
    return font(name, height).getbbox(character, anchor="ls")


def text_width(text: str, name: str, height: int, tracking: float) -> float:
    """Pixels from the start of the first character to the end of the last."""
    return sum(advance(name, height, c) for c in text) + tracking * (len(text) - 1)
