"""Draws the relevance of an image: the image, dim where relevance is low, and a legend of its regions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from fovea.relevance.texture import Bytes, Map

LEAST_SIDE = 640
"""The longer side of the drawn image is at least so many pixels, so that numbers can be told apart."""
LEAST_FONT, LEAST_NUMBER, FONT_PER_SIDE = 13, 7, 75
"""Smallest font of the legend, smallest font of a number in a small region (both in pixels), and the longer
side divided by the font: a large drawing is seen scaled down, so its letters are larger."""
NUMBER_PER_SIDE = 8
"""The shorter side of a region divided by the font of its number, if that is more than LEAST_FONT."""
MUCH_WIDER = 2.0
"""An image with more than this ratio of width to height has its legend below it."""
DIM, WARMTH = 0.4, 0.25
"""Shares of the colours COLD and WARM at relevance 0 and 1. The rest is the image: text stays readable."""
WARM, COLD = np.array((255, 96, 0), np.float32), np.array((24, 36, 72), np.float32)
NATIVE, LOWER, WHOLE_ONLY = (255, 196, 0), (120, 200, 255), (104, 104, 104)
BACKGROUND, WORDS, FAINT_WORDS = (16, 16, 20), (235, 235, 235), (170, 170, 176)
EMS = 29
"""Least width of a legend beside the image, in sizes of its font: as wide as its longest caption."""
HEADER = ("why", "tokens", "resolution", "relevance")
LOOKS = (
    "The model did not look for what your question is about",
    "The model looked once at a small view with your question",
)
BICUBIC = PIL.Image.Resampling.BICUBIC
Region = Mapping[str, Any]
"""One entry of `regions` in an explanation."""
Colour = tuple[int, int, int]
Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels."""
Font = Any


def drawn_size(size: tuple[int, int]) -> tuple[int, int]:
    """Width and height of the image in its drawing, in pixels; it is at the drawing's top left.

    size: width and height of the image itself.
    """
    scale = max(1.0, LEAST_SIDE / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def show(image: PIL.Image.Image, explanation: Mapping[str, Any]) -> PIL.Image.Image:
    """The drawing of one image.

    Relevant cells are warm, others are cold and dim. A region with tokens has a frame, yellow if it was
    encoded at native resolution and blue if at a lower one, and a number in its least relevant corner. The
    legend, right of an image and below a very wide one, says for each number why the region got tokens, how
    many, at which share of the native resolution per side, and its relevance. A region without tokens has a
    thin grey frame.

    image: the image that was sent.
    explanation: the field `relevance` of that image in the answer (`Realization.explanation`).
    """
    size = drawn_size(image.size)
    relevance = _relevance(explanation["map"], size)
    picture = PIL.Image.fromarray(_tint(image.convert("RGB").resize(size, BICUBIC), relevance))
    regions = by_tokens(explanation["regions"])
    legend = _legend(explanation, regions, size)
    canvas = PIL.Image.new("RGB", legend.canvas, BACKGROUND)
    canvas.paste(picture)
    draw = PIL.ImageDraw.Draw(canvas)
    for region in explanation["regions"]:
        if not region["tokens"]:
            draw.rectangle(_pixels(region, size), outline=WHOLE_ONLY)
    for number, region in enumerate(regions, 1):
        room = _frame(draw, _pixels(region, size), _colour(region))
        plate = _plate(str(number), room, legend.font.size)
        corner = _corner(plate, room, relevance, np.asarray(picture, np.float32))
        _write_number(draw, plate, corner, _colour(region))
    _write_legend(draw, legend, regions)
    return canvas


def by_tokens(regions: Sequence[Region]) -> list[Region]:
    """The regions that got tokens, the one with most first. Their numbers in a drawing are in this order."""
    encoded = (region for region in regions if region["tokens"])
    return sorted(encoded, key=lambda region: (-region["tokens"], -region["relevance"]))


def _relevance(cells: Sequence[Sequence[float]], size: tuple[int, int]) -> Map:
    """The relevance of every pixel, (height, width) in [0, 1]. cells: row by row."""
    heat = PIL.Image.fromarray(np.asarray(cells, np.float32))
    return np.asarray(heat.resize(size, PIL.Image.Resampling.BILINEAR)).clip(0, 1)


def _tint(picture: PIL.Image.Image, relevance: Map) -> Bytes:
    """The pixels of the picture, warm where relevance is high, dim where it is low; (height, width, 3)."""
    worth = relevance[:, :, None]
    cold, warm = DIM * (1 - worth), WARMTH * worth**2
    image = np.asarray(picture, np.float32)
    pixels: Bytes = (image * (1 - cold - warm) + COLD * cold + WARM * warm).astype(np.uint8)
    return pixels


def _pixels(region: Region, size: tuple[int, int]) -> Box:
    """The first and last column and row of a region."""
    left, top, right, bottom = (round(share * size[axis % 2]) for axis, share in enumerate(region["box"]))
    return left, top, max(left, right - 1), max(top, bottom - 1)


def _colour(region: Region) -> Colour:
    return NATIVE if region["lod"] >= 1 else LOWER


def _frame(draw: PIL.ImageDraw.ImageDraw, pixels: Box, colour: Colour) -> Box:
    """Draw a frame with a dark edge, which separates it from its neighbours. Return the box inside."""
    left, top, right, bottom = pixels
    draw.rectangle(pixels, outline=BACKGROUND)
    if right - left > 2 and bottom - top > 2:
        draw.rectangle((left + 1, top + 1, right - 1, bottom - 1), outline=colour, width=2)
    return left + 3, top + 3, right - 2, bottom - 2


@dataclass(frozen=True, slots=True)
class Plate:
    """A number on a dark plate.

    size: width and height of the plate in pixels.
    shift: place of the number's text in the plate.
    """

    text: str
    font: Font
    size: tuple[int, int]
    shift: tuple[float, float]


def _plate(text: str, room: Box, largest: int) -> Plate:
    """The plate of a number. It is small in a small region, and fits into all but the smallest.

    largest: the largest font, in pixels.
    """
    width, height = room[2] - room[0], room[3] - room[1]
    plate = None
    for points in range(min(largest, max(LEAST_FONT, min(width, height) // NUMBER_PER_SIDE)), 0, -1):
        font: Font = PIL.ImageFont.load_default(points)
        left, top, right, bottom = font.getbbox(text)
        edge = 1 + points // 6
        size = round(right - left) + 2 * edge, round(bottom - top) + 2 * edge
        plate = Plate(text, font, size, (edge - left, edge - top))
        if points <= LEAST_NUMBER or (size[0] <= width and size[1] <= height):
            break
    assert plate is not None
    return plate


def _corner(plate: Plate, room: Box, relevance: Map, picture: Map) -> tuple[int, int]:
    """The corner of a region in which the plate hides the least relevant pixels; among such, the plainest.

    Returns the left and top of the plate. room: the box inside the region's frame.
    """
    width, height = plate.size
    left, top, right, bottom = room

    def hidden(corner: tuple[int, int]) -> tuple[float, float]:
        x, y = corner
        place = slice(y, y + height), slice(x, x + width)
        return round(float(relevance[place].max()), 1), round(float(picture[place].std()))

    rows, columns = relevance.shape
    inside = (
        (max(0, min(x, columns - 1)), max(0, min(y, rows - 1)))
        for y, x in itertools.product((top, bottom - height), (left, right - width))
    )
    return min(inside, key=hidden)


def _write_number(
    draw: PIL.ImageDraw.ImageDraw, plate: Plate, corner: tuple[float, float], colour: Colour
) -> None:
    x, y = corner
    draw.rectangle((x, y, x + plate.size[0] - 1, y + plate.size[1] - 1), fill=BACKGROUND)
    draw.text((x + plate.shift[0], y + plate.shift[1]), plate.text, fill=colour, font=plate.font)


@dataclass(frozen=True, slots=True)
class Legend:
    """The words of a drawing and their places.

    canvas: width and height of the drawing, image and legend.
    place: left and top of the legend, in pixels.
    line: height of a line.
    captions, last: lines above and below the tables.
    rows: the facts about each region.
    widths: of the columns of a table, without `gap`; the first is that of the number.
    length: the largest number of rows in one of the tables that stand side by side.
    """

    font: Font
    canvas: tuple[int, int]
    place: tuple[int, int]
    line: int
    captions: list[str]
    last: list[str]
    rows: list[tuple[str, ...]]
    widths: list[int]
    length: int

    @property
    def gap(self) -> int:
        """Distance between columns, and between the legend and the edges."""
        return self.line * 2 // 3


def _legend(explanation: Mapping[str, Any], regions: Sequence[Region], size: tuple[int, int]) -> Legend:
    """Lay out the legend: beside the image in at most two tables, or below it in as many as fit."""
    points = max(LEAST_FONT, round(max(size) / FONT_PER_SIDE))
    font: Font = PIL.ImageFont.load_default(points)
    line = points * 3 // 2
    gap = line * 2 // 3
    rows = [_facts(region) for region in regions]
    cells = zip((str(len(rows)), *HEADER), *(("", *row) for row in rows), strict=True)
    widths = [max(int(font.getlength(cell)) + 1 for cell in column) for column in cells]
    table = sum(widths) + gap * len(widths)
    captions, last = _captions(explanation), _without_tokens(explanation)
    beside = size[0] <= MUCH_WIDER * size[1]
    if beside:
        others = len(captions) + len(last) + 3
        tables = 1 if len(rows) <= (size[1] - 2 * gap) // line - others else 2
        width = max(tables * table, EMS * points)
    else:
        tables = max(1, (size[0] - gap) // table)
        width = max(size[0] - gap, table)
    captions = [part for words in captions for part in _wrap(words, font, width - gap)]
    last = [part for words in last for part in _wrap(words, font, width - gap)]
    length = -(-len(rows) // tables)
    height = 2 * gap + line * (len(captions) + len(last) + (length + 2 if rows else 0))
    if beside:
        canvas, place = (size[0] + gap + width, max(size[1], height)), (size[0] + gap, gap)
    else:
        canvas, place = (max(size[0], gap + width), size[1] + height), (gap, size[1] + gap)
    return Legend(font, canvas, place, line, captions, last, rows, widths, length)


def _facts(region: Region) -> tuple[str, ...]:
    """The facts about a region with tokens, in the order of HEADER."""
    return (
        region["why"],
        f"{region['tokens']} of {region['of']}",
        f"{100 * region['lod']:.0f}% of native",
        f"{region['relevance']:.2f}",
    )


def _captions(explanation: Mapping[str, Any]) -> list[str]:
    tensions = explanation["tensions"]
    whole = explanation["thumbnail_tokens"]
    return [
        f"{explanation['tokens']} of {explanation['of']} visual tokens",
        *([f"{whole} of them for the small view of the whole"] if whole else []),
        LOOKS[explanation["looks"]],
        f"compress {tensions['compress_particularize']:.2f}, exploit {tensions['exploit_explore']:.2f}, "
        f"focus {tensions['focus_diversify']:.2f}",
    ]


def _without_tokens(explanation: Mapping[str, Any]) -> list[str]:
    """A line about the regions without tokens of their own, if there are any."""
    count = sum(not region["tokens"] for region in explanation["regions"])
    subject = "1 region (thin grey frame) is" if count == 1 else f"{count} regions (thin grey frames) are"
    place = "only in the small view" if explanation["thumbnail_tokens"] else "left out"
    return [f"{subject} {place}"] if count else []


def _wrap(words: str, font: Font, width: float) -> Iterator[str]:
    """Parts of a line, each at most `width` pixels wide unless it is a single word."""
    part = ""
    for word in words.split():
        longer = f"{part} {word}" if part else word
        if part and font.getlength(longer) > width:
            yield part
            longer = word
        part = longer
    yield part


def _write_legend(draw: PIL.ImageDraw.ImageDraw, legend: Legend, regions: Sequence[Region]) -> None:
    left, top = legend.place

    def write(words: str, x: int, y: int, colour: Colour = WORDS) -> None:
        draw.text((x, y), words, fill=colour, font=legend.font)

    for caption in legend.captions:
        write(caption, left, top)
        top += legend.line
    if legend.rows:
        top += legend.line // 2
    table = sum(legend.widths) + legend.gap * len(legend.widths)
    for index, (row, region) in enumerate(zip(legend.rows, regions, strict=True)):
        across, down = divmod(index, legend.length)
        x, y = left + across * table, top + (down + 1) * legend.line
        places = list(itertools.accumulate((width + legend.gap for width in legend.widths), initial=x))
        if not down:
            for words, place in zip(HEADER, places[1:-1], strict=True):
                write(words, place, top, FAINT_WORDS)
        write(str(index + 1), x, y, _colour(region))
        for words, place in zip(row, places[1:-1], strict=True):
            write(words, place, y)
    top += (legend.length + 1) * legend.line + legend.line // 2 if legend.rows else 0
    for words in legend.last:
        write(words, left, top)
        top += legend.line
