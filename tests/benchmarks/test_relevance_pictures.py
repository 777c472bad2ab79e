"""Tests of benchmarks/pictures.py and relevance_pictures.py: the list of pictures, and the figures.

No test downloads a picture. Figures are compared with numbers that were calculated by hand.
"""

from __future__ import annotations

import hashlib
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import pictures as source
from pictures import Box, Picture, PictureError, download, read_list
from relevance_pictures import (
    Case,
    Reading,
    area,
    best_percentile,
    draw,
    page,
    read,
    summaries,
    token_share,
)

PICTURES = read_list()
MAP = [[0.0, 0.1, 0.2, 0.3], [0.4, 0.5, 0.6, 0.9]]
"""Relevance of two rows of four cells."""


def region(box: Box, tokens: int) -> dict[str, Any]:
    return {"box": list(box), "tokens": tokens, "of": 64, "lod": 1.0, "relevance": 0.5, "why": "a test"}


LEFT, RIGHT, BOTTOM = (
    region((0.0, 0.0, 0.5, 0.5), 30),
    region((0.5, 0.0, 1.0, 0.5), 10),
    region((0.0, 0.5, 1.0, 1.0), 0),
)
EXPLANATION: dict[str, Any] = {
    "tokens": 50,
    "of": 640,
    "grid": [2, 4],
    "thumbnail_tokens": 10,
    "looks": 1,
    "tensions": {"compress_particularize": 0.5, "exploit_explore": 0.5, "focus_diversify": 0.5},
    "map": MAP,
    "regions": [LEFT, RIGHT, BOTTOM],
}


def case(picture: Picture, own: Reading, unrelated: Reading) -> Case:
    return Case(picture, picture.questions[0], own, unrelated, ("yes", "<no>"), (b"own", b"unrelated"))


def test_list_has_40_questions_about_20_pictures() -> None:
    assert len(PICTURES) == 20
    assert sum(len(picture.questions) for picture in PICTURES) == 40
    assert len({picture.name for picture in PICTURES}) == 20
    assert len({picture.sha256 for picture in PICTURES}) == 20
    assert {picture.kind for picture in PICTURES} == {"photo", "screenshot", "diagram", "sheet"}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_entry_of_the_list(picture: Picture) -> None:
    assert len(picture.sha256) == 64
    assert set(picture.sha256) <= set("0123456789abcdef")
    assert Path(picture.path).suffix in {".png", ".jpg", ".webp"}
    assert not Path(picture.path).is_absolute()
    assert picture.package
    assert picture.version
    assert picture.questions
    assert len({question.text for question in picture.questions}) == len(picture.questions)
    for question in picture.questions:
        left, top, right, bottom = question.box
        assert 0 <= left < right <= 1
        assert 0 <= top < bottom <= 1
        assert question.text.endswith("?")
        assert question.unrelated.endswith("?")
        assert question.text != question.unrelated


@pytest.mark.parametrize(
    ("box", "share"),
    [
        ((0.0, 0.0, 0.5, 0.5), 0.75),  # the left region: 30 of 40 tokens
        ((0.0, 0.0, 1.0, 1.0), 1.0),
        ((0.25, 0.0, 0.75, 0.5), 0.5),  # half of either region: 15 + 5 of 40
        ((0.0, 0.25, 0.25, 0.75), 0.1875),  # a quarter of the left region: 7.5 of 40
        ((0.0, 0.5, 1.0, 1.0), 0.0),
    ],
)
def test_share_of_tokens_in_a_box(box: Box, share: float) -> None:
    assert token_share(EXPLANATION["regions"], box) == pytest.approx(share)


def test_no_share_without_a_division() -> None:
    assert token_share([region((0.0, 0.0, 1.0, 1.0), 26)], (0.0, 0.0, 0.5, 0.5)) is None
    assert token_share([BOTTOM, {**LEFT, "tokens": 0}], (0.0, 0.0, 0.5, 0.5)) is None


@pytest.mark.parametrize(
    ("box", "percentile"),
    [
        ((0.75, 0.5, 1.0, 1.0), 100.0),  # the cell of 0.9
        ((0.0, 0.0, 0.25, 0.5), 0.0),  # the cell of 0
        ((0.5, 0.0, 1.0, 0.5), 300 / 7),  # 0.2 and 0.3: three of seven others are lower
        ((0.3, 0.6, 0.35, 0.7), 500 / 7),  # inside the cell of 0.5
        ((0.0, 0.0, 0.55, 0.5), 100 / 7),  # the cell of 0.2 overlaps by a fifth only
    ],
)
def test_percentile_of_the_best_cell(box: Box, percentile: float) -> None:
    assert best_percentile(MAP, box) == pytest.approx(percentile)


def test_half_of_the_equal_cells_count_as_lower() -> None:
    assert best_percentile([[0.5, 0.5, 0.5, 0.5]], (0.0, 0.0, 0.25, 1.0)) == 50.0


def test_reading_has_both_figures() -> None:
    reading = read(EXPLANATION, (0.0, 0.0, 0.5, 0.5))
    assert (reading.share, reading.best) == pytest.approx((0.75, 100 / 7))


def test_means_of_shares_are_over_questions_that_have_both() -> None:
    photo = next(picture for picture in PICTURES if picture.kind == "photo")
    sheet = next(picture for picture in PICTURES if picture.kind == "sheet")
    cases = [
        case(photo, Reading(0.4, 90.0), Reading(0.1, 80.0)),
        case(photo, Reading(0.2, 70.0), Reading(0.2, 70.0)),
        case(sheet, Reading(None, 50.0), Reading(0.9, 60.0)),
    ]
    means = summaries(cases)
    assert list(means) == ["all", "photo", "sheet"]
    assert means["all"] == {
        "questions": 3,
        "divided": 2,
        "area": round(area(photo.questions[0].box), 4),
        "share": 0.3,
        "share_unrelated": 0.15,
        "share_higher": 1,
        "best": 70.0,
        "best_unrelated": 70.0,
        "best_higher": 1,
    }
    assert means["sheet"]["share"] is None
    assert means["sheet"]["divided"] == 0


def test_page_holds_pictures_and_escapes_answers() -> None:
    text = page([case(PICTURES[0], Reading(0.4, 90.0), Reading(None, 80.0))], "a title & more")
    assert "a title &amp; more" in text
    assert "&lt;no&gt;" in text
    assert text.count("data:image/jpeg;base64,") == 2
    assert "share 40.0%, best 90" in text
    assert "http" not in text


def test_drawing_frames_the_asked_box() -> None:
    drawing = draw(PIL.Image.new("RGB", (640, 320)), EXPLANATION, (0.25, 0.25, 0.75, 0.75))
    pixels = PIL.Image.open(io.BytesIO(drawing)).convert("RGB")
    red, green, blue = pixels.getpixel((158, 160))  # type: ignore[misc]
    assert red > 180
    assert green < 90
    assert blue > 180


def test_a_stored_picture_is_not_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"a picture"
    picture = replace(PICTURES[0], sha256=hashlib.sha256(data).hexdigest())
    picture.file(tmp_path).write_bytes(data)
    monkeypatch.setattr("shutil.which", lambda name: None)
    download([picture], tmp_path)
    picture.file(tmp_path).write_bytes(b"another picture")
    with pytest.raises(PictureError, match="apt-get is not on this machine"):
        download([picture], tmp_path)


def test_a_picture_with_another_sha256_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(package: str, version: str, folder: Path) -> Path:
        path = folder / PICTURES[0].path
        path.parent.mkdir(parents=True)
        path.write_bytes(b"a newer picture")
        return folder

    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(source, "_unpack", unpack)
    with pytest.raises(PictureError, match=f"picture {PICTURES[0].name}: .* expected {PICTURES[0].sha256}"):
        download(PICTURES[:1], tmp_path)
    assert not PICTURES[0].file(tmp_path).exists()


def test_a_failed_download_names_package_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "DOWNLOAD", "false")
    monkeypatch.setattr(source, "UNPACK", "true")
    with pytest.raises(PictureError, match=r"cannot download .*: exit code 1; .*apt-get update"):
        download(PICTURES[:1], tmp_path)
