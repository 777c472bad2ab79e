"""A page: its picture, the place of every word on it, and the facts that it shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

from PIL import Image

from fovea.evaluation.documents.content import Content

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels of the page."""


@dataclass(frozen=True, slots=True)
class Word:
    """A run of characters without white space, at its place on the page.

    box: around the characters; its height is that of the font, not of the ink.
    starts: the left edge of each character.
    at: the name of the fact that the word belongs to (see `Page.places`); "" for other words.
    """

    text: str
    box: Box
    starts: tuple[float, ...]
    at: str = ""

    @property
    def middle(self) -> float:
        """The height of the word's middle line."""
        return (self.box[1] + self.box[3]) / 2


@dataclass(frozen=True, slots=True)
class Page:
    """A page and everything that is known of it.

    name: template, fonts and number.
    template: the name of its template.
    font: the family that most of its text is set in.
    words: in the order of the document's text.
    places: the box of each fact, under "title", "field:KEY", "cell:TABLE:ROW:COLUMN", "paragraph:N" and
        "bar:SERIES:N". A fact without a place is not shown.
    """

    name: str
    template: str
    font: str
    image: Image.Image = field(repr=False)
    content: Content
    words: tuple[Word, ...]
    places: Mapping[str, Box]


def lines_of(words: tuple[Word, ...], at: str) -> tuple[tuple[Word, ...], ...]:
    """The words of one paragraph, line by line."""
    lines: list[list[Word]] = []
    for word in words:
        if word.at != at:
            continue
        if lines and abs(lines[-1][-1].middle - word.middle) < (word.box[3] - word.box[1]) / 2:
            lines[-1].append(word)
        else:
            lines.append([word])
    return tuple(tuple(line) for line in lines)


def places_of(words: tuple[Word, ...]) -> dict[str, Box]:
    """The box around the words of each fact."""
    boxes: dict[str, list[Box]] = {}
    for word in words:
        if word.at:
            boxes.setdefault(word.at, []).append(word.box)
    return {at: bounds(some) for at, some in boxes.items()}


def faults(words: tuple[Word, ...], width: int, height: int) -> int:
    """The number of words outside the page, and of pairs of words that overlap.

    Boxes have the height of the font, which may be more than the distance of lines; so only the inner half
    of the height counts.
    """
    inner = [
        (left, (3 * top + bottom) / 4, right, (top + 3 * bottom) / 4)
        for left, top, right, bottom in (word.box for word in words)
    ]
    outside = sum(box[0] < 0 or box[1] < 0 or box[2] > width or box[3] > height for box in inner)
    return outside + sum(
        a[0] < b[2] - 1 and b[0] < a[2] - 1 and a[1] < b[3] and b[1] < a[3] for a, b in combinations(inner, 2)
    )


def bounds(boxes: list[Box]) -> Box:
    """The smallest box around all of `boxes`."""
    return (
        min(box[0] for box in boxes),
        min(box[1] for box in boxes),
        max(box[2] for box in boxes),
        max(box[3] for box in boxes),
    )
