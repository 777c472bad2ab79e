"""What is in an image, exactly: the values that both the drawing and the answers come from.

Lengths are pixels, x to the right and y down, (0, 0) the outer corner of the top left pixel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fovea.evaluation.scenes.vocabulary import CELLS, RGB, ROWS

Box = tuple[float, float, float, float]
"""(left, top, right, bottom)."""


@dataclass(frozen=True, slots=True)
class Item:
    """A filled shape. (x, y) is the centre of its bounding square of side `size`; `cell` counts 0..8 row-major."""

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
        """Its bounding square."""
        half = self.size / 2
        return self.x - half, self.y - half, self.x + half, self.y + half


@dataclass(frozen=True, slots=True)
class Label:
    """A code written in one row of the grid, which holds nothing else.

    height: of its capital letters, in pixels. (x, baseline): where the first character starts.
    tracking: pixels between characters beyond the font's own advance.
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
    """start to end: a linear gradient, downwards or to the right. noise: grey amplitude, 0 for none."""

    start: RGB
    end: RGB
    vertical: bool
    noise: int
    noise_seed: int


@dataclass(frozen=True, slots=True)
class Scene:
    """An image's content. Items are in reading order (by cell), no two in one cell."""

    width: int
    height: int
    background: Background
    items: tuple[Item, ...]
    labels: tuple[Label, ...] = ()

    def in_cell(self, cell: int) -> Item | None:
        return next((item for item in self.items if item.cell == cell), None)

    def matching(self, colour: str | None = None, shape: str | None = None) -> list[Item]:
        """Items of that colour and that shape; None stands for any."""
        return [i for i in self.items if colour in (None, i.colour) and shape in (None, i.shape)]

    def with_items(self, items: tuple[Item, ...]) -> Scene:
        return replace(self, items=tuple(sorted(items, key=lambda item: item.cell)))
