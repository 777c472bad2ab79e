"""/v1/images/pdf, and a question about a page that it drew."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image as Pillow

from tests.media.pdf.test_pages import pdf
from tests.server.support import Server, chat, image, user

PATH, KIND = "/v1/images/pdf", {"content-type": "application/pdf"}


def test_a_page_is_drawn_and_asked_about(server: Server) -> None:
    with server.client() as client:
        answer = client.post(PATH, content=pdf((200, 100), (90, 90)), headers=KIND, params={"max_side": 224})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert (body["pages"], [page["page"] for page in body["data"]]) == (2, [1, 2])
        first = body["data"][0]
        picture = Pillow.open(io.BytesIO(base64.b64decode(first["image_url"].partition(",")[2])))
        assert picture.size == (first["width"], first["height"]) == (224, 112)
        question = chat(user(image(first["image_url"]), "which colour?"))
        assert client.post("/v1/chat/completions", json=question).status_code == 200


@pytest.mark.parametrize(
    ("content", "headers", "query", "status", "param"),
    [
        (b"text", KIND, "", 400, None),
        (pdf((9, 9)), {"content-type": "image/png"}, "", 400, "content-type"),
        (pdf((9, 9)), KIND, "?first=3", 400, "first"),
        (pdf(*[(9, 9)] * 33), KIND, "?first=1&last=1000", 400, "last"),
        (pdf((9, 9), (9, 9)), KIND, "?first=2&last=1", 400, "last"),
        (pdf((9, 9)), KIND, "?max_side=9", 400, "max_side"),
        (b"%PDF-" + bytes(3 << 20), KIND, "", 413, None),
    ],
    ids=["text", "type", "page", "many", "reversed", "side", "large"],
)
def test_wrong_requests(
    server: Server, content: bytes, headers: dict[str, str], query: str, status: int, param: str | None
) -> None:
    with server.client() as client:
        answer = client.post(PATH + query, content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_last_page_beyond_the_end_is_the_last_one(server: Server) -> None:
    """The page promised that, and a file of one page was refused with last=99."""
    with server.client() as client:
        for last in (1, 2, 99, 10**30):
            answer = client.post(f"{PATH}?last={last}", content=pdf((9, 9), (9, 9)), headers=KIND)
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["data"]) == min(last, 2)


def test_a_large_file_of_unknown_length_is_refused(server: Server) -> None:
    """The client sends no Content-Length, so that the bytes have to be counted."""
    pieces = iter([b"%PDF-", bytes(3 << 20)])
    with server.client() as client:
        answer = client.post(PATH, content=pieces, headers=KIND)
    assert answer.status_code == 413, answer.text
