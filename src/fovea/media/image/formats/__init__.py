"""The image formats that are accepted, one file each, and the one list that names them.

TIFF, HEIC, AVIF, SVG and the rest are left out on purpose: each is a large decoder for few images.
"""

from __future__ import annotations

from fovea.media.image.formats import bmp, gif, jpeg, png, webp
from fovea.media.image.formats.base import Facts, Format, NeedMore

FORMATS: tuple[Format, ...] = (png.FORMAT, jpeg.FORMAT, webp.FORMAT, gif.FORMAT, bmp.FORMAT)
ACCEPTED = "PNG, JPEG, WebP, GIF, BMP"

__all__ = ["ACCEPTED", "FORMATS", "Facts", "Format", "NeedMore"]
