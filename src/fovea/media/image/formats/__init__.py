"""The accepted image formats: one module each, and the list of all.

TIFF, HEIC, AVIF, SVG and others are left out on purpose: each needs a large decoder for few images.
"""

from __future__ import annotations

from fovea.media.image.formats import bmp, gif, jpeg, png, webp
from fovea.media.image.formats.base import Facts, Format, IncompleteHeader

FORMATS: tuple[Format, ...] = (png.FORMAT, jpeg.FORMAT, webp.FORMAT, gif.FORMAT, bmp.FORMAT)
ACCEPTED = "PNG, JPEG, WebP, GIF, BMP"

__all__ = ["ACCEPTED", "FORMATS", "Facts", "Format", "IncompleteHeader"]
