"""The values of the generator: the exact content of an image, its vocabulary, and samples with questions.

Both the drawing and the answers are made from a `Scene`. Lengths are in pixels. x goes right and y goes down;
(0, 0) is the outer corner of the top left pixel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from PIL import Image

RGB = tuple[int, int, int]

COLOURS: dict[str, RGB] = {
    "red": (218, 34, 38),
    "green": (36, 150, 58),
    "blue": (34, 74, 220),
    "yellow": (240, 212, 36),
    "orange": (245, 128, 22),
    "purple": (128, 44, 170),
    "pink": (246, 134, 196),
    "cyan": (54, 204, 222),
}
COLOUR_NAMES: tuple[str, ...] = tuple(COLOURS)
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "diamond", "star", "cross")
ROWS: tuple[str, ...] = ("top", "middle", "bottom")
CELLS: tuple[str, ...] = (
    "top left", "top center", "top right",
    "middle left", "center", "middle right",
    "bottom left", "bottom center", "bottom right",
)  # fmt: skip
DIRECTIONS: tuple[str, ...] = ("left", "right", "up", "down")

# O, I, 0 and 1 are left out, because some fonts draw them alike.
CODE_CHARACTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"

# Seeds from here on are for evaluation only. Training uses lower ones.
HELD_OUT_SEED = 1_000_000_000


def plural(noun: str) -> str:
    """The plural of a noun: "crosses" for "cross", "stars" for "star"."""
    return noun + ("es" if noun.endswith("s") else "s")


def article(noun: str) -> str:
    """The noun phrase with "a" or "an" before it."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def join_phrases(phrases: list[str]) -> str:
    """The phrases as a list in a sentence: "a", "a and b", "a, b and c"."""
    if len(phrases) < 2:
        return "".join(phrases)
    return ", ".join(phrases[:-1]) + " and " + phrases[-1]


def sentence(text: str) -> str:
    """The text with an upper first letter and a full stop."""
    return text[0].upper() + text[1:] + "."


Box = tuple[float, float, float, float]
"""A rectangle: (left, top, right, bottom)."""


@dataclass(frozen=True, slots=True)
class Item:
    """A filled shape.

    shape, colour: names from the vocabulary.
    cell: number of its cell in the 3x3 grid, 0 to 8, row by row.
    x, y: centre of its bounding square.
    size: side of its bounding square.
    rgb: the exact colour.
    """

    shape: str
    colour: str
    cell: int
    x: float
    y: float
    size: float
    rgb: RGB

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def place(self) -> str:
        return CELLS[self.cell]

    @property
    def row(self) -> int:
        return self.cell // 3

    @property
    def column(self) -> int:
        return self.cell % 3

    @property
    def box(self) -> Box:
        """The bounding square."""
        half = self.size / 2
        return self.x - half, self.y - half, self.x + half, self.y + half


@dataclass(frozen=True, slots=True)
class Label:
    """A code in one row of the grid. The row holds nothing else.

    text: the code.
    row: 0 to 2, from the top.
    font: a name in `fonts.FONTS`.
    height: height of a capital letter.
    x, baseline: start of the first character.
    tracking: space between characters, beyond the font's own.
    rgb: colour of the text.
    """

    text: str
    row: int
    font: str
    height: int
    x: float
    baseline: float
    tracking: float
    rgb: RGB

    @property
    def place(self) -> str:
        return ROWS[self.row]


@dataclass(frozen=True, slots=True)
class Background:
    """A linear gradient with grey noise.

    start, end: colours of the gradient.
    vertical: whether it goes down; otherwise it goes right.
    noise: amplitude of the noise, in grey values; 0: none.
    noise_seed: seed of the noise.
    """

    start: RGB
    end: RGB
    vertical: bool
    noise: int
    noise_seed: int


@dataclass(frozen=True, slots=True)
class Scene:
    """The content of an image.

    width, height: of the image.
    background: behind everything else.
    items: in reading order (by cell), at most one per cell.
    labels: texts, at most one per row.
    """

    width: int
    height: int
    background: Background
    items: tuple[Item, ...]
    labels: tuple[Label, ...] = ()

    def in_cell(self, cell: int) -> Item | None:
        """The item in a cell; None: there is none."""
        return next((item for item in self.items if item.cell == cell), None)

    def matching(self, colour: str | None = None, shape: str | None = None) -> list[Item]:
        """Items of that colour and that shape; None stands for any."""
        return [i for i in self.items if colour in (None, i.colour) and shape in (None, i.shape)]

    def with_items(self, items: tuple[Item, ...]) -> Scene:
        """The scene with other items, in any order."""
        return replace(self, items=tuple(sorted(items, key=lambda item: item.cell)))


class Turn(NamedTuple):
    """A question with its answers.

    question: text of the question.
    answer: the right answer in the form that the question asks for.
    accepted: all answers that count as right; the first is `answer`. The scorer ignores case, outer white
        space and a final full stop.
    focus: boxes of the first image that contain the answer, in its pixels; () if the answer is at no place in
        particular, and for questions about several images.
    role: who says the question: the user, or a tool that was called, whose result it is then.
    schema: JSON Schema of the answer, which the request brings; None: any text.
    """

    question: str
    answer: str
    accepted: tuple[str, ...]
    focus: tuple[Box, ...] = ()
    role: Literal["user", "tool"] = "user"
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation about one or several images.

    id: kind, seed and index.
    kind: kind of its questions.
    images: all of them belong to the first turn, in order.
    turns: questions with their answers, in order.
    facts: numbers that results can be split by: "count" (counting), "characters" and "height" in pixels of
        the capital letters (reading, small_text), "size" in pixels of the item asked about (small_object),
        "frames" (motion), "width" and "image_height" of the images.
    tools: definitions of the tools that the model is offered, in OpenAI's form.
    """

    id: str
    kind: str
    images: tuple[Image.Image, ...] = field(repr=False)
    turns: tuple[Turn, ...]
    facts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    tools: tuple[Mapping[str, Any], ...] = ()
