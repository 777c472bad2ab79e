"""Converts pictures of any Pillow mode to 8-bit RGB, by one rule for files and for the Python API.

Transparency is composited over white, as documents, charts and screenshots assume. Without the alpha channel,
the colour that an editor left behind transparent pixels would show, often black. For opaque pictures the
result equals `convert("RGB")`, which transformers' processors use.
"""

from __future__ import annotations

import numpy as np
from PIL import Image as Pillow

from fovea.core.errors import InvalidImage

_WITH_ALPHA = frozenset(("RGBA", "LA", "PA", "RGBa", "La"))
_SIXTEEN_BIT = frozenset(("I;16", "I;16L", "I;16B", "I;16N"))
_WITH_COLOUR_KEY = frozenset(("1", "L", "P", "RGB"))
_OPAQUE = frozenset(("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"))
_EMPTY_ALPHA_IS_NONE = frozenset(("BMP", "DIB", "ICO", "CUR", "TGA"))
MODES = _WITH_ALPHA | _SIXTEEN_BIT | _OPAQUE


def to_rgb(picture: Pillow.Image) -> Pillow.Image:
    """Convert a picture to RGB, at its size. Raises InvalidImage for modes without a defined range (F, I)."""
    mode = picture.mode
    if mode not in MODES:
        raise InvalidImage(f"the picture has mode {mode}; accepted: {', '.join(sorted(MODES))}")
    if mode in _SIXTEEN_BIT:
        return _from_sixteen_bit(picture)
    if mode in _WITH_ALPHA or (mode in _WITH_COLOUR_KEY and "transparency" in picture.info):
        return _over_white(_to_rgba(picture))
    return picture if mode == "RGB" else picture.convert("RGB")


def without_empty_alpha(picture: Pillow.Image) -> Pillow.Image:
    """Return a picture without its alpha channel if that is 0 everywhere and the file's format is an old one.

    Many writers of these formats, the Windows clipboard among them, announce an alpha channel and leave it 0.
    Browsers and Windows show such a picture opaque. In PNG and WebP, an alpha channel means what it says.
    """
    if picture.format not in _EMPTY_ALPHA_IS_NONE or picture.mode not in ("RGBA", "LA"):
        return picture
    empty = picture.getchannel("A").getextrema() == (0, 0)
    return picture.convert(picture.mode[:-1]) if empty else picture


def _to_rgba(picture: Pillow.Image) -> Pillow.Image:
    if picture.mode == "La":  # Pillow cannot convert La to RGBA directly
        picture = picture.convert("LA")
    return picture if picture.mode == "RGBA" else picture.convert("RGBA")


def _over_white(picture: Pillow.Image) -> Pillow.Image:
    alpha = picture.getchannel("A")
    rgb = picture.convert("RGB")
    if alpha.getextrema() == (255, 255):
        return rgb
    white = Pillow.new("RGB", picture.size, (255, 255, 255))
    white.paste(rgb, mask=alpha)
    return white


def _from_sixteen_bit(picture: Pillow.Image) -> Pillow.Image:
    """Keep the high byte, as Pillow does for 16-bit RGB; its convert("L") would clip everything to white."""
    values = np.asarray(picture)
    grey = Pillow.fromarray((values >> 8).astype(np.uint8))
    key = picture.info.get("transparency")
    if not isinstance(key, int):
        return grey.convert("RGB")
    alpha = Pillow.fromarray(np.where(values == key, 0, 255).astype(np.uint8))
    return _over_white(Pillow.merge("LA", (grey, alpha)).convert("RGBA"))
