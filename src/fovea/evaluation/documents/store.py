"""Pages in a folder: one picture each, and one line of `pages.jsonl` with all that is known of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from fovea.evaluation.documents.content import Content, Field, Series, Table
from fovea.evaluation.documents.page import Page, Word

INDEX = "pages.jsonl"


def write(page: Page, folder: Path, name: str, form: str = "png", **options: Any) -> None:
    """Append a page to a folder. name: of its picture, without suffix. options: of `Image.save`."""
    folder.mkdir(parents=True, exist_ok=True)
    picture = f"{name}.{form}"
    page.image.save(folder / picture, **options)
    with (folder / INDEX).open("a", encoding="utf-8") as file:
        file.write(json.dumps(_record(page, picture), ensure_ascii=False, separators=(",", ":")) + "\n")


def records(folder: Path) -> Iterator[str]:
    """The lines of a folder's index, one per page, for `read`."""
    with (folder / INDEX).open(encoding="utf-8") as file:
        yield from (line for line in file if line.endswith("\n"))


def read(folder: Path, line: str) -> Page:
    """The page of one line of the index, with its picture."""
    record = json.loads(line)
    return _page(record, Image.open(folder / record["picture"]).convert("RGB"))


def outline(folder: Path, line: str) -> Page:
    """The page of one line of the index. Its image has a size, but its pixels are not read."""
    record = json.loads(line)
    with Image.open(folder / record["picture"]) as image:
        return _page(record, image)


def _page(record: dict[str, Any], image: Image.Image) -> Page:
    words = tuple(Word(text, tuple(box), tuple(starts), at) for text, box, starts, at in record["words"])
    places = {at: tuple(box) for at, box in record["places"].items()}
    return Page(
        record["name"], record["template"], record["font"], image, _content(record["content"]), words, places
    )


def _record(page: Page, picture: str) -> dict[str, Any]:
    return {
        "picture": picture,
        "name": page.name,
        "template": page.template,
        "font": page.font,
        "content": asdict(page.content),
        "words": [[w.text, _round(w.box), _round(w.starts), w.at] for w in page.words],
        "places": {at: _round(box) for at, box in page.places.items()},
    }


def _round(values: tuple[float, ...]) -> list[float]:
    return [round(value, 1) for value in values]


def _content(record: dict[str, Any]) -> Content:
    return Content(
        record["kind"],
        record["title"],
        tuple(Field(**one) for one in record["fields"]),
        tuple(
            Table(tuple(one["columns"]), tuple(tuple(row) for row in one["rows"]), one["noun"])
            for one in record["tables"]
        ),
        tuple(record["paragraphs"]),
        tuple(
            Series(one["axis"], tuple((name, value) for name, value in one["values"]))
            for one in record["series"]
        ),
    )
