"""Renders over real sockets: vLLM's form, the prompt that is then computed, no pixels, and bounds."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import uvloop

from fovea import Engine
from fovea.core.errors import Forbidden, Overloaded
from fovea.engine.config import EngineConfig
from fovea.engine.simulate.serving import SimulatedEngine
from fovea.media.limits import MediaLimits
from fovea.server.app import create_app
from fovea.server.renders import Renders
from fovea.server.run import serving
from fovea.server.settings import AccessSettings, ServerSettings
from tests.engine.simulate.test_serving import FAST
from tests.server.conftest import MAX_IMAGES, Web
from tests.server.support import Json, Server, chat, data_url, frozen, image, picture, running, until, user
from tests.support.clips import clip

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
SHAPE = {
    "request_id", "token_ids", "features", "sampling_params", "model", "stream", "cache_salt", "priority",
}  # fmt: skip
"""The fields of vLLM's `GenerateRequest` that a render has."""
ORIGIN = "https://page.example"


def render(server: Server, body: Json, path: str = CHAT, **options: object) -> Json:
    answer = server.post(f"{path}/render", body, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def two_pictures(seed: int = 700) -> Json:
    urls = [data_url(picture(seed=seed)), data_url(picture(128, 96, seed + 1))]
    return user(image(urls[0]), "left", image(urls[1]), "right: what is different?")


def test_a_conversation_has_the_form_that_vllm_gives_it(server: Server) -> None:
    found = render(server, chat(two_pictures(), cache_salt="s", seed=7, stop=["x"], priority=3))
    assert set(found) == SHAPE
    assert found["request_id"].startswith("chatcmpl-")
    assert (found["model"], found["stream"], found["cache_salt"]) == (server.engine.info.name, False, "s")
    assert found["priority"] == 3
    features = found["features"]
    assert set(features) == {"mm_hashes", "mm_placeholders", "kwargs_data"}
    assert features["kwargs_data"] is None
    names, places = features["mm_hashes"], features["mm_placeholders"]
    assert list(names) == list(places) == ["image"]
    assert [len(name) for name in names["image"]] == [64, 64]
    ids = found["token_ids"]
    for place in places["image"]:
        inside = ids[place["offset"] : place["offset"] + place["length"]]
        assert set(inside) == {server.engine.parts.preparer.builder._tokens[0]}
    params = found["sampling_params"]
    assert (params["max_tokens"], params["temperature"], params["seed"]) == (4, 0, 7)
    assert (params["n"], params["stop"], params["ignore_eos"], params["logprobs"]) == (1, ["x"], True, None)


@pytest.mark.parametrize("content", ["two pictures", "text", "low", "half"])
def test_the_ids_are_those_that_the_answer_is_computed_from(server: Server, content: str) -> None:
    body = {
        "two pictures": chat(two_pictures(702)),
        "text": chat(user("hello there")),
        "low": chat(user(image(data_url(picture(224, 192, 704)), detail="low"), "what is it?")),
        "half": chat(two_pictures(706), visual_tokens={"method": "uniform", "keep": 0.5}),
    }[content]
    answer = server.post(CHAT, {**body, "return_token_ids": True}).json()
    found = render(server, body)
    assert found["token_ids"] == answer["prompt_token_ids"]
    visual = sum(place["length"] for place in places_of(found))
    assert visual == answer["usage"]["prompt_tokens_details"]["image_tokens"]


def places_of(found: Json) -> list[Json]:
    features = found["features"] or {"mm_placeholders": {}}
    return [place for places in features["mm_placeholders"].values() for place in places]


def test_text_has_no_features(server: Server) -> None:
    assert render(server, chat(user("hello there")))["features"] is None


def test_each_text_prompt_is_an_entry_of_a_list(server: Server) -> None:
    found = render(server, {"prompt": ["the red circle", "a"], "max_tokens": 3}, TEXT)
    assert [entry["token_ids"] for entry in found] == [
        server.post("/tokenize", {"prompt": prompt}).json()["tokens"] for prompt in ("the red circle", "a")
    ]
    assert {entry["request_id"][:5] for entry in found} == {"cmpl-"}
    assert [set(entry) for entry in found] == [SHAPE] * 2
    assert [entry["token_ids"] for entry in render(server, {"prompt": [8, 9]}, TEXT)] == [[8, 9]]
    refused = server.post(f"{TEXT}/render", {"prompt": ["a"] * 1025})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_a_conversation_in_anthropics_form_is_the_same_prompt(server: Server) -> None:
    data = base64.b64encode(picture(seed=708)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "what is it?"}]
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    found = render(server, body, MESSAGES)
    same = render(server, chat(user(image(data_url(picture(seed=708))), "what is it?")))
    assert found["token_ids"] == same["token_ids"]
    assert found["features"] == same["features"]
    refused = server.post(f"{MESSAGES}/render", {**body, "max_tokens": 10**6})
    assert (refused.status_code, refused.json()["type"]) == (400, "error")
    assert "context" in refused.json()["error"]["message"]


def test_a_video_has_an_entry_for_each_group_of_frames(server: Server) -> None:
    url = f"data:video/mp4;base64,{base64.b64encode(clip()).decode()}"
    part = {"type": "video_url", "video_url": {"url": url}}
    body = chat({"role": "user", "content": [part, {"type": "text", "text": "what moves?"}]})
    features = render(server, body)["features"]
    assert len(features["mm_hashes"]["video"]) == len(features["mm_placeholders"]["video"]) > 1
    refused = server.post(f"{CHAT}/render", {**body, "video_pruning_rate": 0.5})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "needs_pixels"
    assert refused.json()["error"]["param"] == "video_pruning_rate"


def test_an_image_is_not_decoded(server: Server) -> None:
    """A picture whose pixels are cut off can be rendered: only its header is read."""
    cut = picture(96, 64, seed=710)[:2000]
    body = chat(user(image(data_url(cut)), "what is it?"))
    assert len(places_of(render(server, body))) == 1
    refused = server.post(CHAT, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "image_truncated")


def test_a_remote_image_is_fetched_once(engine: Engine, web: Web, files: Path) -> None:
    web.headers = {"Cache-Control": "max-age=60"}
    settings = ServerSettings(media=MediaLimits(allow_private_hosts=True))
    body = chat(user(image(f"{web.url}/a"), "what is it?"))
    with running(engine, settings, files) as server:
        before = server.metrics()["fovea:decoded_cache_misses_total"]
        first = render(server, body)
        assert render(server, body)["features"] == first["features"]
        assert web.count == 1
        assert server.metrics()["fovea:decoded_cache_misses_total"] == before
        local = chat(user(image(data_url(picture(seed=41))), "what is it?"))
        assert render(server, local)["features"] == first["features"]
    with running(engine, ServerSettings(), files) as server:
        refused = server.post(f"{CHAT}/render", body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "url_not_allowed")
        assert refused.json()["error"]["param"] == "messages[0].content[0].image_url.url"


def test_an_uploaded_image_can_be_rendered(server: Server) -> None:
    url = server.post("/v1/images", {"url": data_url(picture(seed=712))}).json()["url"]
    found = render(server, chat(user(image(url), "what is it?")))
    same = render(server, chat(user(image(data_url(picture(seed=712))), "what is it?")))
    assert found["features"] == same["features"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (chat(user(image("data:image/png;base64,AAAA"), "a")), 400, "messages[0].content[0].image_url.url"),
        (chat(user("a", image("data:image/png;base64,####"))), 400, "messages[0].content[1].image_url.url"),
        (chat(user(image("nothing"))), 400, "messages[0].content[0].image_url.url"),
        (
            chat(user(*[image(data_url(picture()))] * (MAX_IMAGES + 1))),
            400,
            f"messages[0].content[{MAX_IMAGES}].image_url.url",
        ),
        (chat(user("red " * 5000)), 400, "messages"),
        (chat(user("a"), model="other"), 404, "model"),
        (chat(user("a"), temperature=3), 400, "temperature"),
        (chat(user("a"), timeout=1e-6), 408, "timeout"),
    ],
    ids=["no image", "no base64", "no url", "too many", "too long", "model", "a wrong field", "timeout"],
)
def test_errors_are_those_of_the_ordinary_route(server: Server, body: Json, status: int, param: str) -> None:
    refused, usual = (server.post(path, body) for path in (f"{CHAT}/render", CHAT))
    error = refused.json()["error"]
    if status != 408:  # which says during what the time ran out
        assert (refused.status_code, error) == (usual.status_code, usual.json()["error"])
    assert (refused.status_code, error["param"]) == (status, param)


def test_what_follows_from_pixels_is_refused(server: Server) -> None:
    question = user(image(data_url(picture(224, 192))), "read the small word")
    refused = server.post(f"{CHAT}/render", chat(question, visual_tokens={"keep": "auto"}))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "needs_pixels", "visual_tokens")
    assert "reads no pixels" in error["message"]


@pytest.fixture(scope="module")
def limited(engine: Engine, files: Path) -> Iterator[Server]:
    """A server for two keys, with room for four renders and pages of one origin."""
    settings = ServerSettings(
        api_keys=("first", "second"), max_renders=4, access=AccessSettings(cors_origins=(ORIGIN,))
    )
    with running(engine, settings, files) as server:
        yield server


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def test_keys_origins_and_methods_are_those_of_other_routes(limited: Server) -> None:
    body = chat(user("hello"))
    for path in (CHAT, MESSAGES, TEXT):
        assert limited.post(f"{path}/render", body).status_code == 401
        assert limited.get(f"{path}/render", headers=key("first")).status_code == 405
    answer = limited.post(f"{CHAT}/render", body, headers={**key("first"), "Origin": ORIGIN})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)


def test_renders_have_a_bound_and_one_key_has_half_of_it(limited: Server) -> None:
    state = limited.app.state
    names = [client.name for client in state.access.clients]
    body = chat(user("hello"))

    def statuses() -> list[int]:
        return [
            limited.post(f"{CHAT}/render", body, headers=key(name)).status_code
            for name in ("first", "second")
        ]

    assert statuses() == [200, 200]
    with state.renders.place(names[0]), state.renders.place(names[0]):
        assert statuses() == [429, 200]
        with state.renders.place(names[1]), state.renders.place(names[1]):
            refused = limited.post(f"{CHAT}/render", body, headers=key("second"))
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            answer = limited.post(CHAT, body, headers=key("second"))
            assert answer.status_code == 200, "a flood of renders keeps no request for an answer out"
    assert state.renders.running == 0


def test_a_render_takes_no_place_and_no_tokens(engine: Engine, files: Path) -> None:
    with running(engine, ServerSettings(), files) as server:
        before = server.metrics()
        with frozen(engine):
            room = engine.parts.admission._max_in_flight
            tickets = [engine.parts.admission.enter(1) for _ in range(room)]
            assert server.post(CHAT, chat()).status_code == 429
            assert render(server, chat())["token_ids"]
            for ticket in tickets:
                ticket.leave()
        after = server.metrics()
        assert after["fovea:prompt_tokens_sum"] == before["fovea:prompt_tokens_sum"]
        assert server.app.state.places.reserved == 0


def test_a_render_ends_with_its_client(engine: Engine, files: Path, web: Web) -> None:
    """While its image is fetched, it holds a place among the renders."""
    settings = ServerSettings(media=MediaLimits(allow_private_hosts=True))
    with running(engine, settings, files) as server:
        renders = server.app.state.renders
        body = chat(user(image(f"{web.url}/slow"), "what is it?"))
        with server.client() as client:

            def ask() -> None:
                with suppress(httpx.HTTPError, RuntimeError):
                    client.post(f"{CHAT}/render", json=body)

            thread = threading.Thread(target=ask)
            thread.start()
            until(lambda: renders.running == 1)
            client.close()
            until(lambda: renders.running == 0)
            web.released.set()
            thread.join()


def test_renders_can_be_turned_off(engine: Engine, files: Path) -> None:
    with running(engine, ServerSettings(max_renders=0), files) as server:
        refused = server.post(f"{CHAT}/render", chat(user("a")))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "renders_off")


def test_a_bound_is_given_back_after_errors() -> None:
    renders = Renders(2, lambda: True)
    with pytest.raises(ZeroDivisionError), renders.place("a"):
        raise ZeroDivisionError
    with renders.place("a"):
        with pytest.raises(Overloaded, match="half of max_renders"), renders.place("a"):
            raise AssertionError
        with renders.place("b"), pytest.raises(Overloaded, match="at most 2"), renders.place("c"):
            raise AssertionError
    assert renders.running == 0
    with pytest.raises(Forbidden), Renders(0).place("a"):
        raise AssertionError


def test_a_simulated_engine_renders_too() -> None:
    app = create_app(SimulatedEngine(EngineConfig.of(kv_blocks=512), FAST))
    body = chat(two_pictures(714))
    with serving(app, uvloop.new_event_loop) as url, httpx.Client(base_url=url) as client:
        found = client.post(f"{CHAT}/render", json=body).json()
        answer = client.post(CHAT, json={**body, "return_token_ids": True}).json()
        assert len(found["token_ids"]) == answer["usage"]["prompt_tokens"]
        assert len(found["features"]["mm_hashes"]["image"]) == 2
