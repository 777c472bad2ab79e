"""Scanned-like pages keep their words under their places, and pages on disk stay the same."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image, ImageDraw

from fovea.evaluation.documents import scan, store
from fovea.evaluation.documents.content import Content, Field, Series, Table
from fovea.evaluation.documents.page import Page, Word

CONTENT = Content(
    "invoice", "Bill", (Field("total", "Sum", "9"),), (Table(("A", "B"), (("x", "1"),)),), ("Text.",),
    (Series("Sales", (("Q1", "7"),)),),
)  # fmt: skip


def page() -> Page:
    """A white page with one black bar as its word."""
    image = Image.new("RGB", (320, 320), "white")
    ImageDraw.Draw(image).rectangle((240, 50, 279, 59), fill="black")
    word = Word("word", (240, 50, 280, 60), (240, 250, 260, 270), "title")
    return Page("p", "invoice_test", "Test", image, CONTENT, (word,), {"title": word.box})


@pytest.mark.parametrize("degrees", [-3, 3])
def test_words_move_with_the_picture(degrees: float) -> None:
    turned = scan.tilted(page(), degrees)
    dark = np.argwhere(np.asarray(turned.image)[..., 0] < 128)
    top, left = dark.min(0)
    bottom, right = dark.max(0) + 1
    assert turned.words[0].box == pytest.approx((left, top, right, bottom), abs=1.5)
    assert turned.places["title"] == turned.words[0].box
    assert turned.words[0].starts[0] == pytest.approx(left, abs=1.5)


def test_a_map_and_its_inverse_cancel() -> None:
    a, b, c, d, e, f = scan.rotation(20, (50, 60), (10, 5), 1.5)
    assert (a * 50 + b * 60 + c, d * 50 + e * 60 + f) == pytest.approx((10, 5))
    i = scan.inverse((a, b, c, d, e, f))
    assert (i[0] * 10 + i[1] * 5 + i[2], i[3] * 10 + i[4] * 5 + i[5]) == pytest.approx((50, 60))


def test_a_scan_depends_on_its_seed_alone() -> None:
    one, two, other = (scan.scanned(Random(seed), page()) for seed in (1, 1, 2))
    assert one.image.tobytes() == two.image.tobytes() != other.image.tobytes()
    assert one.name == "p/scanned"
    assert one.image.size == page().image.size


def test_a_page_on_disk_is_the_same_page(tmp_path: Path) -> None:
    store.write(page(), tmp_path, "first")
    store.write(page(), tmp_path, "second", "webp", lossless=True)
    for line in store.records(tmp_path):
        again = store.read(tmp_path, line)
        assert (again.content, again.words, dict(again.places)) == (
            CONTENT,
            page().words,
            dict(page().places),
        )
        assert again.image.tobytes() == page().image.tobytes()


def test_a_record_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    """A training reads the folder while pages are added to it."""
    store.write(page(), tmp_path, "first")
    with (tmp_path / store.INDEX).open("a") as file:
        file.write('{"picture": "half')
    assert len(list(store.records(tmp_path))) == 1
