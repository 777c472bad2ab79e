"""Cuts training pictures from stored pages: any place, scale and slight tilt, half of them worn."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from fovea.evaluation.documents import store
from fovea.evaluation.documents.page import Page
from fovea.evaluation.documents.scan import Affine, inverse, rotation, worn
from fovea.evaluation.documents.sheet import sheet

SMALLEST_TEXT = 12.5
"""No scale makes a page's smallest text smaller than so many pixels."""


class Store:
    """The pages of some folders, read when they are needed. New pages are found while others render."""

    def __init__(self, *folders: Path, drawn: bool = True) -> None:
        """drawn: whether the pixels of pages are read. Without them, a page's image has only a size."""
        self.folders, self.drawn = folders, drawn
        self.lines: list[tuple[Path, str]] = []
        self.refresh()

    def refresh(self) -> None:
        self.lines = [
            (folder, line)
            for folder in self.folders
            if (folder / store.INDEX).exists()
            for line in store.records(folder)
        ]

    def page(self, rng: Random) -> Page:
        folder, line = rng.choice(self.lines)
        return store.read(folder, line) if self.drawn else store.outline(folder, line)

    def sheet(self, rng: Random) -> Page:
        """Several pages on a large one, as in the held-out set."""
        while True:
            candidates = (self.page(rng) for _ in range(8))
            size = 32 * rng.randint(28, 42), 32 * rng.randint(22, 42)
            if (made := sheet(rng, candidates, size)) is not None:
                return made[0]


def place(rng: Random, page: Page, size: tuple[int, int]) -> Affine:
    """A random part of a page for a picture of `size`: mostly at its own scale, upright and full of words."""
    width, height = page.image.size
    scale = 1.0 if rng.random() < 0.4 else rng.uniform(0.7, 1.3)
    heights = [word.box[3] - word.box[1] for word in page.words if word.box[3] > word.box[1]]
    scale = max(scale, SMALLEST_TEXT / (min(heights, default=20) * 0.85))
    degrees = rng.uniform(-2, 2) if rng.random() < 0.35 else 0.0
    # The centre is near a random word, so that few pictures are blank.
    word = rng.choice(page.words)
    reach_x, reach_y = size[0] / scale * 0.45, size[1] / scale * 0.45
    x = word.box[0] + rng.uniform(-reach_x, reach_x)
    y = word.middle + rng.uniform(-reach_y, reach_y)
    low_x, low_y = min(size[0] / scale / 2, width / 2), min(size[1] / scale / 2, height / 2)
    x = min(max(x, low_x), width - low_x) + rng.uniform(-8, 8)
    y = min(max(y, low_y), height - low_y) + rng.uniform(-8, 8)
    return rotation(degrees, (x, y), (size[0] / 2, size[1] / 2), scale)


def fullest(rng: Random, page: Page, size: tuple[int, int], points: np.ndarray, tries: int = 4) -> Affine:
    """The part with the most characters, of some random ones. points: of all characters, (n, 2)."""

    def count(affine: Affine) -> int:
        a, b, c, d, e, f = affine
        x, y = a * points[:, 0] + b * points[:, 1] + c, d * points[:, 0] + e * points[:, 1] + f
        return int(((x >= 0) & (x < size[0]) & (y >= 0) & (y < size[1])).sum())

    return max((place(rng, page, size) for _ in range(tries)), key=count)


def cut(rng: Random, page: Page, size: tuple[int, int], affine: Affine, wear: float = 0.5) -> np.ndarray:
    """The pixels of a part of a page, (height, width, 3). wear: how often it is worn like a scan."""
    image = page.image.transform(
        size, Image.Transform.AFFINE, inverse(affine), Image.Resampling.BICUBIC,
        fillcolor=page.image.getpixel((2, 2)),
    )  # fmt: skip
    if rng.random() < wear:
        image = worn(rng, image)
    if rng.random() < 0.05:
        image = Image.eval(image, lambda value: 255 - value)
    return np.asarray(image)
