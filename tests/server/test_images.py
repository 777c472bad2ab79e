"""Uploaded images: encoded once, and named by id in any number of later requests."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from fovea import Engine
from fovea.server.settings import ServerSettings
from tests.server.support import Json, Server, chat, data_url, frozen, image, picture, running, until, user


def upload(server: Server, seed: int, **extra: object) -> Json:
    answer = server.post("/v1/images", {"url": data_url(picture(seed=seed)), **extra})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def answer_about(server: Server, url: str, **extra: object) -> str:
    answer = server.post("/v1/chat/completions", chat(user(image(url), "what is it?"), **extra))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_uploaded_image_is_encoded_once_and_gives_equal_answers(server: Server) -> None:
    before = server.metrics()["fovea:images_encoded_total"]
    card = upload(server, 301)
    assert card["object"] == "image"
    assert card["url"] == f"fovea-image://{card['id']}"
    assert (card["width"], card["height"], card["encoded"], card["visual_tokens"]) == (96, 64, True, 6)
    assert server.metrics()["fovea:images_encoded_total"] == before + 1
    assert answer_about(server, card["url"]) == answer_about(server, data_url(picture(seed=301)))
    assert server.metrics()["fovea:images_encoded_total"] == before + 1
    assert server.metrics()["fovea:image_store_entries"] >= 1


def test_id_depends_on_image_and_salt(server: Server) -> None:
    assert upload(server, 302)["id"] == upload(server, 302)["id"]
    assert upload(server, 302)["id"] != upload(server, 302, cache_salt="other")["id"]
    assert upload(server, 302)["id"] != upload(server, 303)["id"]


def test_upload_without_encoding(server: Server) -> None:
    before = server.metrics()["fovea:images_encoded_total"]
    card = upload(server, 304, encode=False)
    assert card["encoded"] is False
    assert "visual_tokens" not in card
    assert server.metrics()["fovea:images_encoded_total"] == before
    answer_about(server, card["url"])
    assert server.metrics()["fovea:images_encoded_total"] == before + 1


def test_uploaded_and_other_images_in_one_message(server: Server) -> None:
    first, third = upload(server, 305), upload(server, 307)
    urls = [data_url(picture(seed=seed)) for seed in (305, 306, 307)]
    mixed = chat(user(image(first["url"]), image(urls[1]), image(third["url"]), "the same?"))
    plain = chat(user(*map(image, urls), "the same?"))
    answers = [server.post("/v1/chat/completions", body).json() for body in (mixed, plain)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


def test_describe_and_delete_an_image(server: Server) -> None:
    card = upload(server, 308)
    description = server.get(f"/v1/images/{card['id']}").json()
    assert card == {**description, "encoded": True, "visual_tokens": card["visual_tokens"]}
    with server.client() as client:
        assert client.delete(f"/v1/images/{card['id']}").json()["deleted"] is True
        assert client.delete(f"/v1/images/{card['id']}").status_code == 404
        assert client.get(f"/v1/images/{card['id']}").json()["error"]["code"] == "image_not_found"
    refused = server.post("/v1/chat/completions", chat(user(image("data:,"), image(card["url"]))))
    assert refused.status_code == 400


@pytest.mark.parametrize("name", ["nothing", "", "../../etc/passwd", "é" * 200])
def test_unknown_id_is_refused_with_its_json_path(server: Server, name: str) -> None:
    answer = server.post("/v1/chat/completions", chat(user("first", image(f"fovea-image://{name}"))))
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["code"] == "image_not_found"
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert "send the image again to /v1/images" in error["message"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        pytest.param({}, 400, "url", id="nothing"),
        pytest.param({"url": "data:image/png;base64,AAAA"}, 400, "url", id="not an image"),
        pytest.param({"url": "ftp://example.com/a.png"}, 400, "url", id="scheme"),
        pytest.param({"url": data_url(picture()), "model": "other"}, 404, "model", id="model"),
        pytest.param({"url": data_url(picture()), "detail": "huge"}, 400, "detail", id="detail"),
        pytest.param({"url": data_url(picture()), "encode": "maybe"}, 400, "encode", id="encode"),
    ],
)
def test_bad_uploads(server: Server, body: Json, status: int, param: str) -> None:
    answer = server.post("/v1/images", body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


def test_uploaded_images_count_towards_the_limit(server: Server) -> None:
    card = upload(server, 309, encode=False)
    answer = server.post("/v1/chat/completions", chat(user(*[image(card["url"])] * 5)))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "too_many_images"


def test_aborted_upload_leaves_nothing_behind(server: Server) -> None:
    with (
        frozen(server.engine),
        httpx.Client(base_url=server.url, timeout=0.5) as client,
        pytest.raises(Exception, match="timed out"),
    ):
        client.post("/v1/images", json={"url": data_url(picture(seed=310))})
    until(lambda: server.engine.unfinished == 0)
    server.engine.check_integrity()


def test_image_store_has_a_ceiling_and_a_time_to_live(engine: Engine, files: Path) -> None:
    with running(engine, ServerSettings(image_store_mib=0), files) as server:
        answer = server.post("/v1/images", {"url": data_url(picture())})
        assert answer.status_code == 400
        assert "image_store_mib" in answer.json()["error"]["message"]


def test_a_stored_image_is_counted_by_the_store_alone(server: Server) -> None:
    """Otherwise files sent ahead would fill the ceiling for the files of requests."""
    card = server.post("/v1/images", {"url": data_url(picture(seed=4711)), "encode": False}).json()
    assert server.metrics()["fovea:image_store_entries"] >= 1
    assert server.metrics()["fovea:media_held_bytes"] == 0
    answer = server.post("/v1/chat/completions", chat(user(image(card["url"]), "what is it?")))
    assert answer.status_code == 200
    until(lambda: server.metrics()["fovea:media_held_bytes"] == 0)


def test_an_image_that_cannot_be_decoded_is_not_stored(server: Server) -> None:
    for encode in (True, False):
        before = server.metrics()["fovea:image_store_entries"]
        answer = server.post("/v1/images", {"url": data_url(picture(seed=4712)[:-20]), "encode": encode})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "url"
        assert "image 0: the PNG is truncated" in answer.text
        assert server.metrics()["fovea:image_store_entries"] == before
