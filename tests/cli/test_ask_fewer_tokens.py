"""fovea ask --budget, --method and --show: tokens kept, drawings of the regions, and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from fovea import Engine
from fovea.core.media import PixelBudget, VisualTokens
from tests.cli.support import Caller
from tests.support.clips import clip
from tests.support.reduced import patchy_page, roomy

FEW = ("--max-tokens", "4")
ROOT = Path(__file__).resolve().parents[2]
FULL = 240
"""Visual tokens of page.png: 20x12."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return roomy("qwen3_vl", tmp_path_factory.mktemp("fewer tokens") / "tiny")


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small images, a page, the page turned by EXIF orientation, and a video."""
    page = patchy_page(5, 384, 640)
    picture = PIL.Image.frombytes("RGB", (page.width, page.height), page.rgb)
    picture.save(folder / "page.png")
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    picture.rotate(90, expand=True).save(folder / "turned.png", exif=exif)
    (folder / "clip.mp4").write_bytes(clip())
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("flags", "kept", "method"),
    [
        (("--budget", "0.5"), 120, "relevance"),
        pytest.param(("--budget", "120"), 120, "relevance", marks=pytest.mark.slow),
        (("--budget", "2"), 2, "relevance"),
        (("--budget", "0.25", "--method", "dart"), 60, "dart"),
        pytest.param(("--method", "uniform"), 120, "uniform", marks=pytest.mark.slow),
        pytest.param(("--budget", "1"), FULL, None, marks=pytest.mark.slow),
        (("--budget", "1e9"), FULL, None),
        ((), FULL, None),
    ],
    ids=str,
)
def test_the_number_of_kept_tokens(
    fovea: Caller, model: Path, here: Path, flags: tuple[str, ...], kept: int, method: str | None
) -> None:
    outcome = fovea("ask", "page.png", "what is it?", "--json", "--model", model, *FEW, *flags)
    assert (outcome.code, outcome.err) == (0, "")
    (use,) = outcome.json["images"]
    assert use["visual_tokens"] == outcome.json["usage"]["prompt_tokens_details"]["image_tokens"] == kept
    assert (use.get("method"), use.get("of")) == (method, FULL if method else None)
    assert "relevance" not in use


def test_the_answer_is_that_of_the_engine(fovea: Caller, model: Path, here: Path) -> None:
    outcome = fovea("ask", "page.png", "a.png", "read it", "--budget", "0.5", "--model", model, *FEW)
    budget = PixelBudget(visual=VisualTokens("relevance", 0.5))
    with Engine.from_pretrained(str(model), threads=1, kv_cache_mib=16) as engine:
        whole = engine.generate("read it", images=["page.png", "a.png"], budget=budget, max_tokens=4)
    assert outcome.out == whole.text + "\n"


@pytest.mark.parametrize(("name", "kind"), [("heat.png", "PNG"), ("heat.jpg", "JPEG"), ("HEAT.JPEG", "JPEG")])
def test_regions_are_drawn(fovea: Caller, model: Path, here: Path, name: str, kind: str) -> None:
    outcome = fovea(
        "ask", "page.png", "read it", "--budget", "0.3", "--show", name, "--json", "--model", model, *FEW
    )
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.json["images"][0]["relevance"]["tokens"] == 72
    with PIL.Image.open(name) as drawn_image:
        assert drawn_image.format == kind
        assert drawn_image.height == 640
        assert drawn_image.width > 384, "the legend is beside the image"
        shown = np.asarray(drawn_image.convert("RGB"))[:, :384].astype(int)
    with PIL.Image.open("page.png") as page:
        assert (abs(shown - np.asarray(page).astype(int)).mean(axis=2) > 8).any()


def test_the_first_image_is_drawn_with_its_own_number_of_tokens(
    fovea: Caller, model: Path, here: Path
) -> None:
    words = "clip.mp4", "page.png", "a.png", "?", "--budget", "0.5", "--show", "heat.png"
    outcome = fovea("ask", *words, "--json", "--model", model, *FEW)
    kept = [image["visual_tokens"] for image in outcome.json["images"]]
    assert 1 < kept[0] < outcome.json["images"][0]["of"] == FULL
    assert 1 <= kept[1] <= 6
    with PIL.Image.open("heat.png") as drawn_image:
        assert drawn_image.height == 640


def test_a_turned_image_is_drawn_upright(fovea: Caller, model: Path, here: Path) -> None:
    """The model sees the image upright. Once, the map of that was drawn over the turned image."""
    for source, name in (("page.png", "one.png"), ("turned.png", "other.png")):
        outcome = fovea("ask", source, "read it", "--budget", "0.3", "--show", name, "--model", model, *FEW)
        assert (outcome.code, outcome.err) == (0, "")
    with PIL.Image.open("one.png") as one, PIL.Image.open("other.png") as other:
        assert np.array_equal(np.asarray(one), np.asarray(other))


def test_the_region_of_the_text_gets_the_most_tokens(fovea: Caller, tmp_path: Path) -> None:
    """The example of the README. The text's region got 55 tokens, the one beside it 144 for a square."""
    words = ("What does the small text say?", "--budget", "0.5", "--show", tmp_path / "heat.png", "--json")
    outcome = fovea("ask", ROOT / "examples" / "page.png", *words)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.json["text"] == 'The text is "NPX".'
    division = outcome.json["images"][0]["relevance"]
    assert division["tokens"] == 280
    text = np.array(division["map"]).argmax()
    row, column = divmod(int(text), division["grid"][1])
    first, *others = division["regions"]
    left, top, right, bottom = first["box"]
    assert left <= column / division["grid"][1] < right, "the map peaks on the text"
    assert top <= row / division["grid"][0] < bottom
    assert first["relevance"] > max(region["relevance"] for region in others)
    assert first["why"] == "asked about"
    assert first["tokens"] > max(region["tokens"] for region in others)
    shown = [region for region in division["regions"] if region["tokens"]]
    assert all(region["lod"] == 1 for region in shown), "only blank cells were left out"


def test_if_all_tokens_are_kept_there_is_nothing_to_draw(fovea: Caller, model: Path, here: Path) -> None:
    outcome = fovea(
        "ask", "page.png", "read it", "--budget", "1", "--show", "heat.png", "--model", model, *FEW
    )
    assert outcome.code == 0
    assert outcome.error_line == "fovea: all of page.png's tokens were kept, so there is nothing to draw"
    assert not (here / "heat.png").exists()
    (here / "heat.png").write_bytes(b"of an earlier question")
    fovea("ask", "page.png", "read it", "--budget", "1", "--show", "heat.png", "--model", model, *FEW)
    assert (here / "heat.png").read_bytes() == b"of an earlier question"


def test_outputs_from_disk_have_no_regions_to_draw(fovea: Caller, model: Path, here: Path) -> None:
    """Once, the note said that all tokens had been kept."""
    words = ("ask", "page.png", "read it", "--budget", "0.3", "--show", "heat.png", "--model", model, *FEW)
    first = fovea(*words, "--embed-disk-dir", here / "disk")
    assert (first.code, first.err) == (0, "")
    second = fovea(*words, "--embed-disk-dir", here / "disk")
    assert second.out == first.out
    assert "came from a cache that does not store their regions" in second.error_line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("page.png", "?", "--show", "heat.gif"),
            "--show heat.gif: accepted are names that end in .png or .jpg",
        ),
        (("page.png", "?", "--show", "heat"), "--show heat: accepted are names that end in .png or .jpg"),
        (("clip.mp4", "?", "--show", "heat.png"), "--show draws an image, and there is none"),
        (("?", "--show", "heat.png"), "--show draws an image, and there is none"),
        (
            ("page.png", "?", "--show", "heat.png", "--method", "dart"),
            "--show is for the method relevance, not dart",
        ),
        (("page.png", "?", "--show", "none/heat.png"), "none/heat.png cannot be written: No such file"),
        (("missing.png", "?", "--show", "heat.png"), "image 0: missing.png cannot be read: No such file"),
        (
            ("page.png", "?", "--method", "half"),
            "visual_tokens: there is no method 'half'; accepted: resize, ",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_in_a_line(
    words: tuple[str, ...], message: str, fovea: Caller, here: Path, model: Path
) -> None:
    outcome = fovea("ask", *words, "--model", model)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.error_line.startswith(f"fovea: {message}")
    assert not list(here.glob("heat*")), "the test whether the file can be written left an empty file"


def test_several_images_share_a_budget(fovea: Caller, model: Path, here: Path) -> None:
    words = ("--method", "views", "--budget", "260", "--json", "--model", model, *FEW)
    for question, close in (("what is in the first image?", 0), ("read the last picture", 1)):
        outcome = fovea("ask", "page.png", "turned.png", question, *words)
        assert (outcome.code, outcome.err) == (0, "")
        images = outcome.json["images"]
        assert images[close]["visual_tokens"] == FULL
        assert "method" not in images[close]
        other = images[1 - close]
        assert (other["method"], other["of"]) == ("views", FULL)
        assert other["visual_tokens"] <= 16


@pytest.mark.parametrize("budget", ["0", "-1", "1.5", "abc", "inf", "nan", ""])
def test_a_wrong_budget_shows_the_usage(budget: str, fovea: Caller) -> None:
    outcome = fovea("ask", "page.png", "?", f"--budget={budget}")
    assert (outcome.code, outcome.out) == (2, "")
    usage, error = outcome.err.splitlines()
    assert usage.startswith("usage: fovea ")
    assert "argument --budget: " in error
    assert budget in error
