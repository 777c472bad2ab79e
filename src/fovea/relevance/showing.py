"""A picture of what was seen where: the image, dim where it was hardly looked at, with each region's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

LEAST_SIDE = 640
"""Small images are drawn larger, so that numbers can be read."""
LINE = 22
WARM, COLD = np.array((255, 96, 0), np.float32), np.array((24, 36, 72), np.float32)
NATIVE, LOWER = (255, 196, 0), (120, 200, 255)


def show(image: PIL.Image.Image, explanation: Mapping[str, Any]) -> PIL.Image.Image:
    """image: as it was sent. explanation: the `relevance` of its answer.

    Warm is relevant, cold and dark is not. A region's frame is yellow where it was encoded at native resolution and blue
    where at a lower one, with its tokens in the corner; regions without a frame were seen in the thumbnail alone.
    """
    scale = max(1.0, LEAST_SIDE / max(image.size))
    size = round(image.width * scale), round(image.height * scale)
    picture = image.convert("RGB").resize(size, PIL.Image.Resampling.BICUBIC)
    heat = PIL.Image.fromarray(np.asarray(explanation["map"], np.float32))
    worth = np.asarray(heat.resize(size, PIL.Image.Resampling.BILINEAR))[:, :, None].clip(0, 1)
    pixels = np.asarray(picture, np.float32)
    tint = worth * WARM + (1 - worth) * COLD
    strength = np.where(worth > 0.5, 0.55 * (worth - 0.5), 1.1 * (0.5 - worth))
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
    seen = f"{explanation['tokens']} of {explanation['of']} visual tokens"
    return (
        seen + (f", {whole} of them for the whole" if whole else ""),
        f"compress {tensions['compress_particularize']:.2f}   exploit {tensions['exploit_explore']:.2f}   "
        f"focus {tensions['focus_diversify']:.2f}",
    )
