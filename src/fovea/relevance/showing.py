"""Draws the relevance of an image: the image, dim where relevance is low, with the division among regions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from fovea.relevance.texture import Bytes, Map

LEAST_SIDE = 640
"""The longer side of the drawing is at least so many pixels, so that the words in it can be read."""
LINE, FONT_SIZE, STROKE, MARGIN = 20, 13, 2, 5
"""Height of a line of the captions, size of the font, width of the dark line around letters on the image, and
distance of words from a frame, all in pixels."""
WARM, COLD = np.array((255, 96, 0), np.float32), np.array((24, 36, 72), np.float32)
NATIVE, LOWER, WHOLE_ONLY = (255, 196, 0), (120, 200, 255), (176, 176, 176)
BACKGROUND, WORDS, OUTLINE = (16, 16, 20), (235, 235, 235), (0, 0, 0)
BICUBIC = PIL.Image.Resampling.BICUBIC
Colour = tuple[int, int, int]
Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels."""


def show(image: PIL.Image.Image, explanation: Mapping[str, Any]) -> PIL.Image.Image:
    """The drawing of one image.

    Relevant cells are warm, others are cold and dark. The frame of a region is yellow if it was encoded at
    native resolution, blue if at a lower one, and grey if it is only in the view of the whole. The words in
    it are its relevance, its tokens, and its share of the native resolution per side. They are in the least
    relevant corner. A region that is too small for them has a number, and its words are below the image.

    image: the image that was sent.
    explanation: the field `relevance` of that image in the answer (`Realization.explanation`).
    """
    scale = max(1.0, LEAST_SIDE / max(image.size))
    size = round(image.width * scale), round(image.height * scale)
    relevance = _relevance(explanation["map"], size)
    font = PIL.ImageFont.load_default(FONT_SIZE)
    notes: list[str] = []
    pixels = PIL.Image.fromarray(_tint(image.convert("RGB").resize(size, BICUBIC), relevance))
    draw = PIL.ImageDraw.Draw(pixels)
    for region in explanation["regions"]:
        box = _frame(draw, region, size)
        words = _words(draw, region, (box[2] - box[0], box[3] - box[1]), font)
        if words is None:
            words = f"{len(notes) + 1}"
            notes.append(f"{words}:  {', '.join(_facts(region))}")
        _write(draw, words, box, relevance, _colour(region), font)
    lines = (*_captions(explanation), *notes)
    canvas = PIL.Image.new("RGB", (size[0], size[1] + len(lines) * LINE + MARGIN), BACKGROUND)
    canvas.paste(pixels)
    for number, line in enumerate(lines):
        PIL.ImageDraw.Draw(canvas).text((MARGIN, size[1] + 3 + number * LINE), line, fill=WORDS, font=font)
    return canvas


def _relevance(cells: Sequence[Sequence[float]], size: tuple[int, int]) -> Map:
    """The relevance of every pixel, (height, width) in [0, 1]. cells: row by row."""
    heat = PIL.Image.fromarray(np.asarray(cells, np.float32))
    return np.asarray(heat.resize(size, PIL.Image.Resampling.BILINEAR)).clip(0, 1)


def _tint(picture: PIL.Image.Image, relevance: Map) -> Bytes:
    """The pixels of the picture, warm where relevance is high, (height, width, 3) bytes."""
    worth = relevance[:, :, None]
    tint = worth * WARM + (1 - worth) * COLD
    strength = np.where(worth > 0.5, 0.55 * (worth - 0.5), 1.1 * (0.5 - worth))
    pixels: Bytes = (np.asarray(picture, np.float32) * (1 - strength) + tint * strength).astype(np.uint8)
    return pixels


def _frame(draw: PIL.ImageDraw.ImageDraw, region: Mapping[str, Any], size: tuple[int, int]) -> Box:
    """Draw a region's frame; return the box inside it."""
    left, top, right, bottom = (round(share * size[axis % 2]) for axis, share in enumerate(region["box"]))
    draw.rectangle((left + 1, top + 1, right - 2, bottom - 2), outline=_colour(region), width=2)
    return left + MARGIN, top + MARGIN, right - MARGIN, bottom - MARGIN


def _colour(region: Mapping[str, Any]) -> Colour:
    if not region["tokens"]:
        return WHOLE_ONLY
    return NATIVE if region["lod"] >= 1 else LOWER


def _facts(region: Mapping[str, Any]) -> tuple[str, str, str]:
    return (
        f"relevance {region['relevance']:.2f}",
        f"{region['tokens']} of {region['of']} tokens",
        f"{100 * region['lod']:.0f}% of native resolution",
    )


def _words(
    draw: PIL.ImageDraw.ImageDraw, region: Mapping[str, Any], room: tuple[int, int], font: Any
) -> str | None:
    """A region's facts, in lines or in one line; None if there is no room for either."""
    for separator in ("\n", ", "):
        words = separator.join(_facts(region))
        _, _, width, height = draw.multiline_textbbox((0, 0), words, font=font, stroke_width=STROKE)
        if width <= room[0] and height <= room[1]:
            return words
    return None


def _write(
    draw: PIL.ImageDraw.ImageDraw, words: str, box: Box, relevance: Map, colour: Colour, font: Any
) -> None:
    """Write the words into the corner of the box in which they hide the least relevant pixels."""
    edges = draw.multiline_textbbox((0, 0), words, font=font, stroke_width=STROKE)
    width, height = math.ceil(edges[2]), math.ceil(edges[3])
    left, top, right, bottom = box
    corners = ((left, top), (right - width, top), (left, bottom - height), (right - width, bottom - height))

    def hidden(corner: tuple[int, int]) -> float:
        x, y = (max(0, place) for place in corner)
        return round(float(relevance[y : y + height + 1, x : x + width + 1].max()), 1)

    place = min(corners, key=hidden)
    draw.multiline_text(place, words, fill=colour, font=font, stroke_width=STROKE, stroke_fill=OUTLINE)


def _captions(explanation: Mapping[str, Any]) -> tuple[str, str]:
    tensions = explanation["tensions"]
    whole = explanation["thumbnail_tokens"]
    share = f"{explanation['tokens']} of {explanation['of']} visual tokens"
    return (
        share + (f", {whole} of them for the whole" if whole else ""),
        f"compress {tensions['compress_particularize']:.2f}   exploit {tensions['exploit_explore']:.2f}   "
        f"focus {tensions['focus_diversify']:.2f}",
    )
