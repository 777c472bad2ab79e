"""A server of a model for text alone: every API refuses images, videos and PDF files before it reads them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from fovea import Engine
from fovea.doctor.check import Status, not_applicable
from fovea.doctor.checks import answers, exposure
from fovea.doctor.server import HttpWeb
from fovea.doctor.server import Server as Examined
from fovea.doctor.subject import Subject
from fovea.server.settings import ServerSettings
from tests.server.support import Server, running
from tests.support.checkpoints.text import write_text

URL = "http://127.0.0.1:9/nothing-listens.png"
"""To fetch it would be another error: requests may not name private addresses."""
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
VIDEO = {"type": "video_url", "video_url": {"url": URL}}
TEXT = {"type": "text", "text": "what is it?"}
CHAT = {"messages": [{"role": "system", "content": "hi"}, {"role": "user", "content": [TEXT, IMAGE]}]}
WHERE = "messages[1].content[1].image_url.url"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_text("qwen2", tmp_path_factory.mktemp("text"))
    with (
        Engine.from_pretrained(str(folder), dtype="float32", threads=1, kv_cache_mib=16) as engine,
        running(engine, ServerSettings(), folder) as server,
    ):
        yield server


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", CHAT, WHERE),
        ("/v1/chat/completions", {**CHAT, "stream": True}, WHERE),
        ("/tokenize", CHAT, WHERE),
        ("/v1/predict", {"instances": [CHAT]}, f"instances[0].{WHERE}"),
        ("/v1/images", {"url": URL}, "url"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
            "input[0].content[0].image_url",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 4,
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "source": {"type": "url", "url": URL}}, TEXT],
                    }
                ],
            },
            "messages[0].content[0].source",
        ),
    ],
)
def test_an_image_is_refused_before_it_is_fetched(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert "this is an image, and the model text" in error["message"]
    assert error["message"].endswith("takes text alone; accepted: parts of type text")
    assert error["param"] == param


def test_a_video_and_a_pdf_file_are_refused(server: Server) -> None:
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [TEXT, VIDEO]}]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (
        "video_not_supported",
        "messages[0].content[1].video_url.url",
    )
    headers = {"content-type": "application/pdf"}
    answer = httpx.post(server.url + "/v1/images/pdf", content=b"%PDF-1.7 not read", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("this is a PDF file, and the model text")


def test_text_is_answered_and_the_model_says_what_it_takes(server: Server) -> None:
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert httpx.get(server.url + "/v1/models").json()["data"][0]["input_modalities"] == ["text"]
    metrics = server.metrics()
    for name in ("images_total", "images_encoded_total", "encode_seconds_total", "pixel_cache_lookups_total"):
        assert metrics[f"fovea:{name}"] == 0


def test_the_doctor_makes_no_checks_of_images(server: Server) -> None:
    examined = Examined(server.url, HttpWeb())
    assert not examined.takes_images
    subject = cast(Subject, SimpleNamespace(server=examined))
    for check in (answers.image, answers.image_cache, exposure.private_images, exposure.files):
        assert check(subject) == not_applicable("the model takes text alone")
    assert answers.text(subject).status is Status.PASS
