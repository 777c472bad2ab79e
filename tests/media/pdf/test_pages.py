"""Pages of PDF files, drawn in a worker process."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import cycle

import pytest
from PIL import Image as Pillow
from PIL import ImageDraw

from fovea.core.errors import InvalidRequest, Unavailable
from fovea.core.media import Abandoned
from fovea.media.limits import MediaLimits
from fovea.media.pdf import InvalidPdf, PageRange
from fovea.media.sandbox import decoder
from fovea.media.sandbox.decoder import DocumentRenderer

COLOURS = ("red", "green", "blue")


def pdf(*sizes: tuple[int, int]) -> bytes:
    """A PDF whose pages have one colour each, with a black square in the middle. sizes: pixels at 72 dpi."""
    pictures = []
    for size, colour in zip(sizes, cycle(COLOURS)):
        picture = Pillow.new("RGB", size, colour)
        middle = (size[0] // 2, size[1] // 2)
        ImageDraw.Draw(picture).rectangle((*middle, middle[0] + 9, middle[1] + 9), fill="black")
        pictures.append(picture)
    out = io.BytesIO()
    pictures[0].save(out, "PDF", save_all=True, append_images=pictures[1:], resolution=72.0)
    return out.getvalue()


@pytest.fixture(scope="module")
def renderer() -> Iterator[DocumentRenderer]:
    renderer = DocumentRenderer(MediaLimits())
    yield renderer
    renderer.close()


def test_pages_are_drawn_in_order_and_size(renderer: DocumentRenderer) -> None:
    pages, total = renderer.render(pdf((200, 100), (100, 300), (50, 50)), PageRange(1, 2, 400))
    assert total == 3
    assert [(page.number, page.width, page.height) for page in pages] == [(1, 400, 200), (2, 134, 400)]
    for page, colour in zip(pages, COLOURS, strict=False):
        picture = Pillow.open(io.BytesIO(page.jpeg))
        assert picture.size == (page.width, page.height)
        pixel = picture.getpixel((3, 3))
        assert isinstance(pixel, tuple)
        assert max(range(3), key=lambda at: pixel[at]) == COLOURS.index(colour)


def test_a_last_page_beyond_the_end_means_the_last_one(renderer: DocumentRenderer) -> None:
    pages, total = renderer.render(pdf((60, 60), (60, 60)), PageRange(2, 9))
    assert ([page.number for page in pages], total) == ([2], 2)


@pytest.mark.parametrize(
    ("data", "wanted", "code"),
    [
        (b"no pdf", PageRange(), "not_a_pdf"),
        (b"%PDF-1.7 and then nothing", PageRange(), "invalid_pdf"),
        (pdf((60, 60)), PageRange(2, 3), "no_such_page"),
    ],
    ids=["text", "header", "page"],
)
def test_what_cannot_be_drawn_is_an_error(
    renderer: DocumentRenderer, data: bytes, wanted: PageRange, code: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        renderer.render(data, wanted)
    assert error.value.code == code


def test_damaged_files_are_drawn_or_refused(renderer: DocumentRenderer) -> None:
    """PDFium repairs some. None takes its process down for good."""
    good = pdf((120, 80), (80, 120))
    refused = drawn = 0
    for at in range(0, len(good), max(1, len(good) // 40)):
        try:
            pages, _ = renderer.render(good[:at] + b"\xff\x00\xff" + good[at + 3 :], PageRange())
            drawn += all(page.width > 0 for page in pages)
        except InvalidPdf:
            refused += 1
    assert drawn + refused >= 40
    assert refused > 0
    assert renderer.render(good, PageRange()).total == 2


def test_a_server_may_refuse_all_of_them() -> None:
    with pytest.raises(Unavailable, match="pdf_workers is 0"):
        DocumentRenderer(MediaLimits(pdf_workers=0)).render(pdf((9, 9)), PageRange())


def test_pages_together_have_a_limit(renderer: DocumentRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call would otherwise put 32 pages of up to 16 MiB each into the server's memory."""
    monkeypatch.setattr(decoder, "MOST_BYTES", 3000)
    assert len(renderer.render(pdf((60, 60), (60, 60)), PageRange(1, 1, 64)).pages) == 1
    with pytest.raises(InvalidRequest, match="fewer pages in one call, or a smaller max_side") as error:
        renderer.render(pdf((60, 60), (60, 60), (60, 60)), PageRange(1, 3, 300))
    assert error.value.code == "pages_too_large"


def test_a_file_that_nobody_waits_for_ends_its_process(renderer: DocumentRenderer) -> None:
    """A file that would be drawn for minutes does not keep the process from the next one."""
    asked = iter([False])
    with pytest.raises(Abandoned):
        renderer.render(endless_pdf(), PageRange(), lambda: next(asked, True))
    assert renderer.render(pdf((60, 60)), PageRange()).total == 1


def endless_pdf() -> bytes:
    """A small PDF whose page is filled again and again with a pattern of very many tiles."""
    tile = b"0 0 1 1 re f"
    fills = b"/Pattern cs /P scn 0 0 600 800 re f " * 200
    return (
        b"%%PDF-1.7\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
        b"2 0 obj<</Type/Pages/Count 1/Kids[3 0 R]>>endobj\n"
        b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Contents 4 0 R"
        b"/Resources<</Pattern<</P 5 0 R>>>>>>endobj\n"
        b"4 0 obj<</Length %d>>stream\n%s\nendstream endobj\n"
        b"5 0 obj<</PatternType 1/PaintType 1/TilingType 1/BBox[0 0 1 1]/XStep 0.0001/YStep 0.0001"
        b"/Resources<<>>/Length %d>>stream\n%s\nendstream endobj\n"
        b"trailer<</Root 1 0 R>>" % (len(fills), fills, len(tile), tile)
    )
