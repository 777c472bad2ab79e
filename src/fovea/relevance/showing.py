"""Draws the relevance of an image: the image, dim where relevance is low, with the tokens of each region."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

LEAST_SIDE = 640
"""The longer side of the drawing is at least so many pixels, so that the numbers in it can be read."""
LINE = 22
WARM, COLD = np.array((255, 96, 0), np.float32), np.array((24, 36, 72), np.float32)
NATIVE, LOWER = (255, 196, 0), (120, 200, 255)


def show(image: PIL.Image.Image, explanation: Mapping[str, Any]) -> PIL.Image.Image:
    """The drawing of one image.

    Relevant cells are warm, others are cold and dark. The frame of a region is yellow if it was encoded at
    native resolution, and blue if at a lower one; its number of tokens is in the corner. A region without a
    frame is only in the view of the whole.

    image: the image that was sent.
    explanation: the field `relevance` of that image in the answer (`Realization.explanation`).
    """
    scale = max(1.0, LEAST_SIDE / max(image.size))
    size = round(image.width * scale), round(image.height * scale)
    picture = image.convert("RGB").resize(size, PIL.Image.Resampling.BICUBIC)
    heat = PIL.Image.fromarray(np.asarray(explanation["map"], np.float32))
    relevance = np.asarray(heat.resize(size, PIL.Image.Resampling.BILINEAR))[:, :, None].clip(0, 1)
    pixels = np.asarray(picture, np.float32)
    tint = relevance * WARM + (1 - relevance) * COLD
    strength = np.where(relevance > 0.5, 0.55 * (relevance - 0.5), 1.1 * (0.5 - relevance))
    mixed = PIL.Image.fromarray((pixels * (1 - strength) + tint * strength).astype(np.uint8))
    canvas = PIL.Image.new("RGB", (size[0], size[1] + 2 * LINE), (16, 16, 20))
    canvas.paste(mixed)
    draw = PIL.ImageDraw.Draw(canvas)
    font = PIL.ImageFont.load_default(13)
    for region in explanation["regions"]:
        _frame(draw, region, size, font)
    for line, text in enumerate(_captions(explanation)):
        draw.text((6, size[1] + 4 + line * (LINE - 2)), text, fill=(235, 235, 235), font=font)
    return canvas


def _frame(
    draw: PIL.ImageDraw.ImageDraw, region: Mapping[str, Any], size: tuple[int, int], font: Any
) -> None:
    if not region["tokens"]:
        return
    left, top, right, bottom = (share * size[axis % 2] for axis, share in enumerate(region["box"]))
    colour = NATIVE if region["lod"] >= 1 else LOWER
    draw.rectangle((left + 1, top + 1, right - 2, bottom - 2), outline=colour, width=2)
    draw.text(
        (left + 5, top + 3),
        str(region["tokens"]),
        fill=colour,
        font=font,
        stroke_width=2,
        stroke_fill=(0, 0, 0),
    )


def _captions(explanation: Mapping[str, Any]) -> tuple[str, str]:
    tensions = explanation["tensions"]
    whole = explanation["thumbnail_tokens"]
    share = f"{explanation['tokens']} of {explanation['of']} visual tokens"
    return (
        share + (f", {whole} of them for the whole" if whole else ""),
        f"compress {tensions['compress_particularize']:.2f}   exploit {tensions['exploit_explore']:.2f}   "
        f"focus {tensions['focus_diversify']:.2f}",
    )
