"""The exact content of an image: the values from which both the drawing and the answers are made.

Lengths are in pixels. x goes right and y goes down; (0, 0) is the outer corner of the top left pixel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fovea.evaluation.scenes.vocabulary import CELLS, RGB, ROWS

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
