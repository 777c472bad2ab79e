"""Draws the held-out pages that the package fovea-page holds, into packages/page/fovea_page/pages.

    python -m tools.held_out_pages [--count 330] [--folder FOLDER]

It needs Chromium, matplotlib, Typst and the fonts of docs/documents.md, and takes about ten minutes. Equal
versions of these draw equal pages. Of 20 pages, 10 are HTML documents, 3 charts, 2 are set by Typst, 5 are
sheets of 1344x1024 pixels or more with several documents. A third of each looks scanned. Pictures are WebP:
lossless, or lossy for scanned ones, whose noise would make them large.

The stored boxes of words are as high as the size of their text, in pixels, whatever drew them.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from PIL import ImageFont

from fovea.core.errors import ConfigError
from fovea.evaluation.documents import store
from fovea.evaluation.documents.charts import draw_chart
from fovea.evaluation.documents.chromium import Renderer, browser, templates
from fovea.evaluation.documents.page import Page, Word
from fovea.evaluation.documents.scan import scanned
from fovea.evaluation.documents.sheet import sheet
from fovea.evaluation.documents.typst import draw_typst, typst_templates

FOLDER = Path(__file__).parents[1] / "packages/page/fovea_page/pages"
SEED = "held-out pages 1"
PATTERN = (
    "html", "sheet", "html", "chart", "html", "sheet", "typst", "html", "sheet", "html",
    "html", "sheet", "html", "chart", "sheet", "html", "typst", "html", "chart", "html",
)  # fmt: skip
"""The sorts of 20 pages in a row."""
WIDTH, HEIGHTS = 1344, (1024, 1120, 1216, 1344, 1344)
"""Width of sheets, and the heights that they are drawn from."""
SPARE, ORDERS = 20, 60
"""Documents that a sheet is chosen from, and orders in which they are tried. Most words count."""
GIVEN_UP = 4
"""So many of the documents that were left longest are given up after each sheet; they hardly ever fit."""
LOSSLESS = {"lossless": True, "quality": 80, "method": 4}
LOSSY, SMALLER = {"quality": 60, "method": 6}, {"quality": 35, "method": 6}
LARGEST_FILE = 90_000
"""A scanned page with so much noise that LOSSY needs more bytes is stored as SMALLER."""


class Drawing:
    """Draws pages of all sorts. Every page has a seed of its own."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._names = {"html": templates(held_out=True), "typst": typst_templates()}
        self._counts: Counter[str] = Counter()
        self._spare: list[Page] = []

    def pages(self, count: int) -> Iterator[Page]:
        """`count` pages; every third one of each template looks scanned."""
        for number in range(count):
            rng, sort = Random(f"{SEED}/{number}"), PATTERN[number % len(PATTERN)]
            page = self._draw(rng, sort, self._counts[sort])
            self._counts[sort] += 1
            self._counts[page.template] += 1
            yield worn_out(rng, page) if self._counts[page.template] % 3 == 2 else page

    def _draw(self, rng: Random, sort: str, number: int) -> Page:
        if sort == "sheet":
            return self._sheet(rng)
        if sort == "chart":
            return sized(draw_chart(rng, held_out=True), 1.0)
        name = self._names[sort][number % len(self._names[sort])]
        if sort == "typst":
            return sized(draw_typst(rng, name), 1.0)
        page = self._renderer.draw(rng, name)
        return sized(page, line_height(page.font))

    def _sheet(self, rng: Random) -> Page:
        """A sheet with much text. Documents that are on none yet are kept for the next ones."""
        size, done = (WIDTH, rng.choice(HEIGHTS)), []
        while not done:
            while len(self._spare) < SPARE:
                sort = "chart" if len(self._spare) % 5 == 0 else "html"
                self._spare.append(self._draw(rng, sort, rng.randrange(1000)))
            orders = (rng.sample(self._spare, SPARE) for _ in range(ORDERS))
            done = [made for order in orders if (made := sheet(rng, order, size)) is not None]
            self._spare = self._spare if done else self._spare[SPARE // 2 :]
        page, used = max(done, key=lambda made: len(made[0].words))
        left = [spare for spare in self._spare if all(spare is not each for each in used)]
        self._spare = left[GIVEN_UP:]
        return page


def sized(page: Page, ratio: float) -> Page:
    """The page with boxes of words that are as high as the size of their text.

    ratio: height of the boxes as a multiple of that size.
    """

    def resized(word: Word) -> Word:
        half = (word.box[3] - word.box[1]) / ratio / 2
        box = (word.box[0], word.middle - half, word.box[2], word.middle + half)
        return replace(word, box=box, starts=())

    return replace(page, words=tuple(map(resized, page.words)))


@cache
def line_height(family: str) -> float:
    """Height of a line of a font as a multiple of its size, as Chromium has it: ascent and descent."""
    found = subprocess.run(
        ("fc-match", "--format=%{family}|%{file}", f"{family}:regular"),
        capture_output=True,
        text=True,
        check=True,
    )
    families, _, file = found.stdout.partition("|")
    if family not in families.split(","):
        raise ConfigError(f"the font {family} is not installed")
    return sum(ImageFont.truetype(file, 1000).getmetrics()) / 1000


def worn_out(rng: Random, page: Page) -> Page:
    """The page as if scanned, at a tilt that leaves all words on it. Heights of words stay as they are."""
    degrees = 1.5
    while outside(after := scanned(rng, page, degrees)) > outside(page):
        degrees *= 0.8
    words = (_as_high(new, old) for new, old in zip(after.words, page.words, strict=True))
    return replace(after, words=tuple(words))


def outside(page: Page) -> int:
    """The number of words that are not wholly on the page."""
    width, height = page.image.size
    boxes = [word.box for word in page.words]
    return sum(box[0] < 0 or box[1] < 0 or box[2] > width or box[3] > height for box in boxes)


def _as_high(word: Word, before: Word) -> Word:
    half = (before.box[3] - before.box[1]) / 2
    return replace(word, box=(word.box[0], word.middle - half, word.box[2], word.middle + half))


def form_of(page: Page) -> dict[str, Any]:
    """The options of WebP for a page."""
    if not page.name.endswith("/scanned"):
        return LOSSLESS
    file = io.BytesIO()
    page.image.save(file, "WEBP", **LOSSY)
    return LOSSY if file.tell() <= LARGEST_FILE else SMALLER


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--count", type=int, default=330)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if (folder / store.INDEX).exists():
        shutil.rmtree(folder)
    with browser(held_out=True) as renderer:
        for number, page in enumerate(Drawing(renderer).pages(arguments.count)):
            store.write(page, folder, f"{number:03d}", "webp", **form_of(page))
            print(f"{number:03d} {page.name} {page.image.size[0]}x{page.image.size[1]}", flush=True)
    total = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{arguments.count} pages, {total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
