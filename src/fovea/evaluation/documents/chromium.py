"""Renders HTML templates with Chromium, and reads from it where each character stands."""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image

from fovea.core.errors import ConfigError
from fovea.evaluation.documents import vocabulary
from fovea.evaluation.documents.content import Content
from fovea.evaluation.documents.kinds import KINDS
from fovea.evaluation.documents.page import Page, Word, places_of
from fovea.evaluation.documents.style import HELD_OUT_FONTS, TRAINING_FONTS, style

TEMPLATES = Path(__file__).with_name("templates")
SIDE = 32
"""Pages are a multiple of this many pixels wide and high: the cell of one visual token."""
LARGEST = 1344
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-sync", "--force-color-profile=srgb", "--hide-scrollbars")  # fmt: skip
READ_WORDS = """() => {
  const words = [], range = document.createRange();
  let faults = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const at = node.parentElement.closest("[data-at]");
    const upper = getComputedStyle(node.parentElement).textTransform === "uppercase";
    for (const match of node.data.matchAll(/\\S+/g)) {
      const starts = []; let box = null;
      for (let i = match.index; i < match.index + match[0].length; i++) {
        range.setStart(node, i); range.setEnd(node, i + 1);
        const part = range.getBoundingClientRect();
        box = box || [part.left, part.top, part.right, part.bottom];
        if (Math.abs(part.top - box[1]) > 1) { faults++; break; }
        box[2] = part.right; starts.push(part.left);
      }
      if (box[3] === box[1]) continue;
      words.push([upper ? match[0].toUpperCase() : match[0], box, starts, at ? at.dataset.at : ""]);
    }
  }
  const inner = ([left, top, right, bottom]) => [left, (3 * top + bottom) / 4, right, (top + 3 * bottom) / 4];
  const middle = words.map((word) => inner(word[1]));
  for (let i = 0; i < words.length; i++) for (let j = 0; j < i; j++) {
    const [a, b] = [middle[i], middle[j]];
    if (a[0] < b[2] - 1 && b[0] < a[2] - 1 && a[1] < b[3] && b[1] < a[3]) faults++;
  }
  const page = [Math.ceil(document.documentElement.scrollWidth), Math.ceil(document.body.scrollHeight)];
  faults += middle.filter((box) => box[0] < 0 || box[1] < 0 || box[2] > page[0] || box[3] > page[1]).length;
  return [words, ...page, faults];
}"""
"""Returns the words in the order of the text, the width and height that the page needs, and its faults.

Faults are words that are broken into two lines or outside the page, and pairs of words that overlap. Words
without a size, of elements that are not displayed, are left out.
"""
ATTEMPTS = 80


def templates(held_out: bool) -> tuple[str, ...]:
    """The names of the templates for training, or of those that are held out, such as "invoice_columns"."""
    folder = TEMPLATES / ("held_out" if held_out else "training")
    return tuple(sorted(path.stem for path in folder.glob("*.html")))


def environment(held_out: bool) -> Environment:
    """Jinja, with the templates for training or those that are held out."""
    return Environment(
        loader=FileSystemLoader([TEMPLATES, TEMPLATES / ("held_out" if held_out else "training")]),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


class Renderer:
    """Draws pages in one browser. `browser()` makes it.

    held_out: whether templates and fonts are those that are kept from training.
    """

    def __init__(self, tab: Any, held_out: bool) -> None:
        self._tab, self._held_out = tab, held_out
        self._capture = tab.context.new_cdp_session(tab)
        self._jinja = environment(held_out)

    def draw(self, rng: Random, template: str | None = None) -> Page:
        """A page of a random template and font, or of the template that is named.

        The page is as wide as drawn from the template's range, and as high as its text needs. If that is
        more than LARGEST, or the page has faults, other facts are drawn for a page that may be wider.
        Raises RuntimeError if no attempt succeeds: the template is wrong.
        """
        name = template or rng.choice(templates(self._held_out))
        fonts = HELD_OUT_FONTS if self._held_out else TRAINING_FONTS
        kind = name.partition("_")[0]
        for attempt in range(ATTEMPTS):
            look, content = style(rng, fonts), KINDS[kind](rng)
            html = self._jinja.get_template(f"{name}.html").render(
                doc=content, s=look, rng=rng, **helpers(content, rng)
            )
            narrow = kind in ("receipt", "ticket", "parcel", "form", "screen", "dashboard", "payslip")
            width = SIDE * (rng.randint(14, 30) if narrow else rng.randint(20, LARGEST // SIDE))
            width = min(LARGEST, max(width, SIDE * (look.size * 26 // SIDE)) + SIDE * 2 * attempt)
            self._tab.set_viewport_size({"width": width, "height": SIDE * 10})
            self._tab.set_content(html)
            words, wide, high, faults = self._tab.evaluate(READ_WORDS)
            height = -(-(high + rng.choice((0, 0, 20, 60))) // SIDE) * SIDE
            if wide <= width and height <= LARGEST and not faults:
                return self._page(f"{name}/{look.font}", name, look.font, content, words, (width, height))
        raise RuntimeError(f"template {name}: none of {ATTEMPTS} pages fits {LARGEST} pixels without faults")

    def _page(
        self, label: str, template: str, font: str, content: Content, words: list[Any], size: tuple[int, int]
    ) -> Page:
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        shot = self._capture.send(
            "Page.captureScreenshot",
            {"format": "png", "optimizeForSpeed": True, "clip": clip, "captureBeyondViewport": True},
        )
        image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
        read = tuple(Word(text, tuple(box), tuple(starts), at) for text, box, starts, at in words)
        return Page(label, template, font, image, content, read, places_of(read))


def helpers(content: Content, rng: Random) -> dict[str, Any]:
    """Functions that templates call: marks around the printed facts, and filler that no question is about."""

    def mark(at: str, text: str) -> Markup:
        return Markup('<span data-at="{}">{}</span>').format(at, text)

    return {
        "mark": mark,
        "title": mark("title", content.title),
        "value": lambda one: mark(f"field:{one.key}", one.value),
        "cell": lambda t, r, c: mark(f"cell:{t}:{r}:{c}", content.tables[t].rows[r][c]),
        "paragraph": lambda n: mark(f"paragraph:{n}", content.paragraphs[n]),
        "escape": escape,
        "word": lambda: vocabulary.word(rng),
        "name": lambda: vocabulary.name(rng),
        "company": lambda: vocabulary.company(rng),
        "address": lambda: f"{vocabulary.street(rng)}, {vocabulary.city(rng)}",
        "entry": lambda: rng.choice(vocabulary.WORDS).capitalize(),
        "sentence": lambda low=5, high=13: vocabulary.sentence(rng, low, high),
    }


@contextmanager
def browser(held_out: bool) -> Iterator[Renderer]:
    """A Chromium without a window. Raises ConfigError if there is none."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise ConfigError("no program chromium: on Debian, `apt install chromium`")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield Renderer(chromium.new_page(device_scale_factor=1), held_out)
        chromium.close()
