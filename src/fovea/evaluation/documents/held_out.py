"""Evaluation cases about the held-out pages that come with fovea-page.

No training page has the templates or the fonts of these pages. The pictures are read when a case is asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from PIL import Image

from fovea.core.bundled import page_package
from fovea.core.errors import CheckpointError, InvalidRequest
from fovea.evaluation.datasets import Case, Exchange
from fovea.evaluation.documents import sheet, store
from fovea.evaluation.documents.page import Box, Page
from fovea.evaluation.documents.questions import KINDS
from fovea.evaluation.scenes import HELD_OUT_SEED
from fovea.evaluation.scenes.sample import Turn

SMALL_TEXT = 16
"""Text below this size, in pixels, is a row of its own in reports."""
TRIES = 6
"""Questions that are drawn of one page and kind to find one that was not asked yet."""
LARGE = (1344, 1344)
"""Width and height of the pages that are timed."""
LARGE_PAGES = f"pages of {LARGE[0]}x{LARGE[1]}"


@dataclass(frozen=True, slots=True)
class Shipped:
    """A page of the package.

    picture: the file of its picture.
    number: its place in the index.
    page: all that is known of it. Its image has a size and no pixels.
    """

    picture: Path
    number: int
    page: Page


def pages_folder() -> Path:
    """The folder of the held-out pages. Raises CheckpointError if fovea-page or its pages are missing."""
    folder = page_package() / "pages"
    if not (folder / store.INDEX).is_file():
        raise CheckpointError(f"{folder} holds no pages; reinstall with: pip install 'fovea[page]'")
    return folder


def shipped_pages(folder: Path | None = None) -> list[Shipped]:
    """All pages of the package, or of a folder that `store.write` filled, in the order of its index."""
    folder = folder or pages_folder()
    return [
        Shipped(folder / json.loads(line)["picture"], number, store.outline(folder, line))
        for number, line in enumerate(store.records(folder))
    ]


def document_cases(
    per_kind: int,
    kinds: Sequence[str] = tuple(KINDS),
    seed: int = HELD_OUT_SEED,
    folder: Path | None = None,
) -> Iterator[Case]:
    """Cases about held-out pages, `per_kind` of each kind, those of one page one after the other.

    Each kind is asked of every page that has such facts once, then of every page a second time, and so on. No
    page gets the same question twice. Equal arguments give equal cases.

    seed: chooses the questions; the pages are the same.
    folder: of pages; by default those of the package.
    Raises CheckpointError without the pages, InvalidRequest for an unknown kind, and for more questions of a
    kind than the pages have.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise InvalidRequest(f"unknown kind {unknown[0]!r}; there are {', '.join(KINDS)}", param="kinds")
    pages = shipped_pages(folder)
    cases = [
        (shipped.number, _case(kind, shipped, turn, f"{kind}-{seed}-{index}"))
        for kind in dict.fromkeys(kinds)
        for index, (shipped, turn) in enumerate(_turns(kind, pages, per_kind, seed))
    ]
    return (case for _, case in sorted(cases, key=lambda entry: entry[0]))


def large_pages(count: int, seed: int = HELD_OUT_SEED, folder: Path | None = None) -> list[Case]:
    """Cases to be timed: fields of the largest pages, with margins added up to LARGE.

    Fewer than `count` if there are not so many pages with fields. Raises CheckpointError without the pages.
    """
    pages = sorted(shipped_pages(folder), key=lambda shipped: -_area(shipped.page))
    cases: list[Case] = []
    for shipped in pages:
        turn = KINDS["field"](Random(f"{seed}/timed/{shipped.number}"), shipped.page)
        if turn is not None and len(cases) < count:
            case = _case("field", shipped, turn, f"timed-{seed}-{shipped.number}")
            cases.append(_enlarged(case, shipped.picture))
    return cases


def _turns(kind: str, pages: Sequence[Shipped], count: int, seed: int) -> Iterator[tuple[Shipped, Turn]]:
    order = Random(f"{seed}/{kind}").sample(pages, len(pages))
    asked: set[tuple[int, str, str, tuple[Box, ...]]] = set()
    for lap in range(count):
        before = len(asked)
        for shipped in order:
            if len(asked) == count:
                return
            rng = Random(f"{seed}/{kind}/{shipped.number}/{lap}")
            for _ in range(TRIES):
                turn = KINDS[kind](rng, shipped.page)
                if turn is not None and (same := _identity(shipped, turn)) not in asked:
                    asked.add(same)
                    yield shipped, turn
                    break
        if len(asked) == before:
            break
    if len(asked) < count:
        raise InvalidRequest(
            f"the held-out pages have {len(asked)} questions of the kind {kind!r}; {count} were asked for",
            param="count",
        )


def _identity(shipped: Shipped, turn: Turn) -> tuple[int, str, str, tuple[Box, ...]]:
    """Two questions with the same one are the same question, perhaps in other words."""
    words = "" if turn.focus and turn.schema is None else turn.question
    return shipped.number, words, turn.answer, turn.focus


def _case(kind: str, shipped: Shipped, turn: Turn, name: str) -> Case:
    page = shipped.page
    exchange = Exchange(turn.question, turn.accepted, turn.role, turn.schema, turn.focus)
    width, height = page.image.size
    scanned = page.name.endswith("/scanned")
    facts = {
        "width": width, "image_height": height, "characters": len(turn.answer), "scanned": int(scanned)
    }  # fmt: skip
    parts = [
        f"look: {'scanned' if scanned else 'clean'}",
        f"page: {page.content.kind}",
        f"renderer: {renderer_of(page.template)}",
    ]
    size = text_size(page, turn.focus)
    if size is not None:
        facts["height"] = size
        parts.append(f"text: {'below' if size < SMALL_TEXT else 'at least'} {SMALL_TEXT} px")
    return Case(name, kind, (shipped.picture,), (exchange,), facts, parts=tuple(parts))


def text_size(page: Page, focus: Sequence[Box]) -> int | None:
    """The size in pixels of the smallest text in the boxes of an answer; None: there is no word in them."""
    inside = (
        word.box[3] - word.box[1]
        for word in page.words
        if any(
            box[0] <= (word.box[0] + word.box[2]) / 2 <= box[2] and box[1] <= word.middle <= box[3]
            for box in focus
        )
    )
    smallest = min(inside, default=None)
    return None if smallest is None else round(smallest)


def renderer_of(template: str) -> str:
    """The name of the program that draws a template."""
    if template == sheet.NAME:
        return "several"
    if template.startswith("chart_"):
        return "matplotlib"
    return "Typst" if template.endswith("_typst") else "Chromium"


def _area(page: Page) -> int:
    return page.image.size[0] * page.image.size[1]


def _enlarged(case: Case, picture: Path) -> Case:
    """The case with its picture at the top left of one of LARGE, in the colour of its corner."""
    with Image.open(picture) as opened:
        image = opened.convert("RGB")
    large = Image.new("RGB", LARGE, image.getpixel((2, 2)))
    large.paste(image, (0, 0))
    facts = {**case.facts, "width": LARGE[0], "image_height": LARGE[1]}
    return replace(case, images=(large,), facts=facts)
