"""The field `visual_tokens` over a real socket: numbers of tokens, the report in the answer, and refusals."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import openai
import PIL.Image
import pytest

from fovea import Engine
from fovea.engine.visual_budget.methods import METHODS
from fovea.observe.table import RELEVANCE_GAUGES, RELEVANCE_SPREADS, TENSION_GAUGE, TENSIONS
from fovea.server.settings import ServerSettings
from tests.server.support import Server, chat, data_url, frozen, image, picture, running, until, user
from tests.support.clips import clip
from tests.support.engines import SETTINGS
from tests.support.reduced import patchy_page, roomy

Json = dict[str, Any]
FULL = 240
"""Number of visual tokens of the page: 20x12."""


@cache
def page(seed: int = 0, width: int = 384, height: int = 640) -> str:
    image = patchy_page(seed, width, height)
    out = io.BytesIO()
    PIL.Image.frombytes("RGB", (image.width, image.height), image.rgb).save(out, "PNG")
    return data_url(out.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return roomy("qwen3_vl", tmp_path_factory.mktemp("visual tokens") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with ServerWithSettings(folder) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


class ServerWithSettings:
    """A server with an engine of its own. settings: those of the engine."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._engine = Engine.from_pretrained(str(folder), **{**SETTINGS, **settings})
        self._running = running(self._engine, ServerSettings(), folder)

    def __enter__(self) -> Server:
        return self._running.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._running.__exit__(*error)
        self._engine.__exit__(*error)


def ask(server: Server, *parts: Any, **extra: Any) -> Json:
    reply = server.post("/v1/chat/completions", chat(user(*parts), **extra))
    assert reply.status_code == 200, reply.text
    body: Json = reply.json()
    return body


def image_reports(body: Json) -> list[Json]:
    reports: list[Json] = body["fovea"]["images"]
    assert sum(image["visual_tokens"] for image in reports) == tokens(body)
    return reports


def tokens(body: Json) -> int:
    return int(body["usage"]["prompt_tokens_details"]["image_tokens"])


@pytest.mark.parametrize("method", sorted(name for name in METHODS if name != "views"))
def test_every_method(server: Server, method: str) -> None:
    body = ask(server, image(page()), "what is it?", visual_tokens={"method": method, "keep": 0.5})
    (report,) = image_reports(body)
    assert (report["method"], report["of"]) == (method, FULL)
    assert "relevance" not in report
    if method == "resize":
        assert FULL / 4 < report["visual_tokens"] <= FULL / 2
    else:
        assert report["visual_tokens"] == FULL // 2


@pytest.mark.parametrize(
    ("wish", "kept", "method"),
    [
        ({"keep": 0.5}, 120, "relevance"),
        ({"keep": 0.25}, 60, "relevance"),
        ({"budget": 40}, 40, "relevance"),
        ({"method": "dart", "budget": 7}, 7, "dart"),
        ({"method": "uniform"}, 120, "uniform"),
        ({"preset": "fast"}, 120, "relevance"),
        ({"preset": "general"}, 180, "dpp"),
        ({"preset": "document"}, FULL, None),
        ({"keep": 1}, FULL, None),
        ({"budget": FULL}, FULL, None),
        (None, FULL, None),
    ],
    ids=str,
)
def test_number_of_visual_tokens(server: Server, wish: Json | None, kept: int, method: str | None) -> None:
    body = ask(server, image(page()), "what is it?", visual_tokens=wish)
    (report,) = image_reports(body)
    assert report["visual_tokens"] == kept
    assert (report.get("method"), report.get("of")) == (method, FULL if method else None)
    tokenized = server.post(
        "/tokenize", {"messages": [user(image(page()), "what is it?")], "visual_tokens": wish}
    )
    assert tokenized.json()["count"] == body["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "wish", [{}, {"keep": None, "budget": None, "method": None, "preset": None}], ids=str
)
def test_relevance_chooses_the_number_by_the_image(server: Server, wish: Json) -> None:
    """Without a number in the request, a line of a nearly empty page costs less than one of a full page."""
    bare = PIL.Image.new("RGB", (1280, 960), "white")
    bare.paste((20, 20, 20), (600, 400, 660, 460))
    counts = []
    for each in (bare, PIL.Image.effect_noise((1280, 960), 90).convert("RGB")):
        file = io.BytesIO()
        each.save(file, "PNG")
        body = ask(server, image(data_url(file.getvalue())), "what does it say?", visual_tokens=wish)
        counts.append(image_reports(body)[0]["visual_tokens"])
    assert 1 <= counts[0] < counts[1] <= 1200


def test_every_image_has_its_own_quota(server: Server) -> None:
    parts = [image(page()), image(data_url(picture(96, 64))), image(page(1), max_pixels=32 * 32 * 100)]
    plain = image_reports(ask(server, *parts, "compare them"))
    reports = image_reports(ask(server, *parts, "compare them", visual_tokens={"keep": 0.5}))
    assert [one["of"] for one in reports] == [one["visual_tokens"] for one in plain]
    assert [one["visual_tokens"] for one in reports] == [-(-one["visual_tokens"] // 2) for one in plain]
    few = image_reports(ask(server, *parts, "compare them", visual_tokens={"method": "tome", "budget": 10}))
    assert [one["visual_tokens"] for one in few] == [10, 6, 10]
    assert [one.get("method") for one in few] == ["tome", None, "tome"]


def test_views_share_one_budget(server: Server) -> None:
    """The image that the question names keeps all of its tokens, the others get few.

    The answer says which ones.
    """
    parts = [image(page()), image(page(1)), image(page(2))]
    for words, close in (("what is in the second image?", 1), ("and in the last picture?", 2)):
        reports = image_reports(
            ask(server, *parts, words, visual_tokens={"method": "views", "budget": FULL + 32})
        )
        assert [one["visual_tokens"] == FULL for one in reports] == [place == close for place in range(3)]
        for place, one in enumerate(reports):
            expected = (None, None) if place == close else ("views", FULL)
            assert (one.get("method"), one.get("of")) == expected
            assert one["visual_tokens"] <= (FULL if place == close else 16)
    tokenized = server.post(
        "/tokenize",
        {
            "messages": [user(*parts, "and in the last picture?")],
            "visual_tokens": {"method": "views", "budget": FULL + 50},
        },
    )
    body = ask(
        server, *parts, "and in the last picture?", visual_tokens={"method": "views", "budget": FULL + 50}
    )
    assert tokenized.json()["count"] == body["usage"]["prompt_tokens"]
    messages = [user(*parts, "which?")]
    reply = server.post(
        "/v1/chat/completions", {"messages": messages, "visual_tokens": {"method": "views", "budget": 2}}
    )
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "visual_tokens")
    assert "2 tokens for 3 images; views gives each image a token or more; accepted: 3 or more" in reply.text


def test_views_as_a_policy(folder: Path) -> None:
    with ServerWithSettings(folder, visual_tokens="views:0.4") as server:
        (alone,) = image_reports(ask(server, image(page()), "what is it?"))
        assert (alone["visual_tokens"], alone.get("method")) == (FULL, None)
        reports = image_reports(
            ask(server, *(image(page(number)) for number in range(3)), "what is in image 3?")
        )
        assert sum(one["visual_tokens"] for one in reports) <= 0.4 * 3 * FULL
        assert [one.get("method") for one in reports] == ["views", "views", None]


def test_visual_tokens_do_not_apply_to_videos(server: Server) -> None:
    film = {"type": "video_url", "video_url": {"url": data_url(clip(), "video/mp4")}}
    plain = tokens(ask(server, film, "what moved?"))
    assert tokens(ask(server, film, "what moved?", visual_tokens={"keep": 0.25})) == plain


def test_visual_tokens_with_the_openai_client(client: openai.OpenAI) -> None:
    wish = {"method": "relevance", "keep": 0.5, "explain": True}
    given: Json = {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": 4,
        "messages": [user(image(page()), "read it")],
    }
    whole = client.chat.completions.create(**given, extra_body={"visual_tokens": wish})
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.image_tokens == FULL // 2  # type: ignore[attr-defined]
    (report,) = (whole.model_extra or {})["fovea"]["images"]
    stream = client.chat.completions.create(**given, stream=True, extra_body={"visual_tokens": wish})
    extensions = [chunk.model_extra["fovea"] for chunk in stream if "fovea" in (chunk.model_extra or {})]
    assert [extension["images"] for extension in extensions] == [[report]]
    assert report["relevance"]["tokens"] == FULL // 2


def test_explanation_adds_up(server: Server) -> None:
    """Tokens of regions add up to those of the image, boxes tile the image, the map has its grid's size."""
    body = ask(server, image(page(2)), "read the small text", visual_tokens={"keep": 0.5, "explain": True})
    (report,) = image_reports(body)
    explanation = report["relevance"]
    assert (explanation["tokens"], explanation["of"], explanation["grid"]) == (FULL // 2, FULL, [20, 12])
    regions = explanation["regions"]
    assert explanation["thumbnail_tokens"] + sum(region["tokens"] for region in regions) == FULL // 2
    assert sum(region["of"] for region in regions) == FULL
    area = sum(
        (right - left) * (low - top) for left, top, right, low in (region["box"] for region in regions)
    )
    assert area == pytest.approx(1, abs=0.01)
    assert [len(line) for line in explanation["map"]] == [12] * 20
    assert set(explanation["tensions"]) == set(TENSIONS)
    for region in regions:
        for name in ("propositional", "perspectival", "participatory", "relevance"):
            assert 0 <= region[name] <= 1
        assert (region["lod"] == 0) == (region["tokens"] == 0)
        assert region["tokens"] <= region["of"]


def test_explanation_only_on_request_and_for_relevance(server: Server) -> None:
    for wish in ({"keep": 0.5}, {"method": "dart", "explain": True}, {"keep": 1, "explain": True}):
        (report,) = image_reports(ask(server, image(page()), "what is it?", visual_tokens=wish))
        assert "relevance" not in report


@pytest.mark.parametrize(
    ("wish", "param", "message"),
    [
        ({"method": "half"}, "visual_tokens.method", "there is no method 'half'; accepted: resize, uniform"),
        ({"method": ""}, "visual_tokens.method", "there is no method ''; accepted: resize, uniform, "),
        ({"keep": 0.5, "budget": 10}, "visual_tokens", "keep and budget say the same; send one"),
        ({"keep": 0}, "visual_tokens.keep", "visual_tokens.keep: must be a number of more than 0"),
        ({"keep": 1.5}, "visual_tokens.keep", "visual_tokens.keep: must be a number of more than 0"),
        ({"keep": "half"}, "visual_tokens.keep", "visual_tokens.keep: must be a number of more than 0"),
        ({"keep": True}, "visual_tokens.keep", "visual_tokens.keep: must be a number of more than 0"),
        ({"budget": 0}, "visual_tokens.budget", "visual_tokens.budget: must be greater than or equal to 1"),
        ({"budget": 2.5}, "visual_tokens.budget", "visual_tokens.budget: must be a"),
        ({"preset": "best"}, "visual_tokens.preset", "must be 'document', 'general' or 'fast', got 'best'"),
        ({"preset": "fast", "method": "dart"}, "visual_tokens.preset", "accepted beside it: explain"),
        ({"preset": "fast", "keep": 0.5}, "visual_tokens.preset", "accepted beside it: explain"),
        ({"preset": "document", "budget": 5}, "visual_tokens.preset", "accepted beside it: explain"),
        ({"method": "fast", "keep": 0.9}, "visual_tokens", "the preset fast sets how much is kept"),
        ({"explain": 1}, "visual_tokens.explain", "visual_tokens.explain: must be"),
        ({"budgets": 5}, "visual_tokens.budgets", "did you mean 'budget'"),
        (0.5, "visual_tokens", "visual_tokens: must be an object"),
    ],
    ids=str,
)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("with_image", [True, False])
def test_errors_name_the_wrong_field(
    server: Server, route: str, with_image: bool, wish: Any, param: str, message: str
) -> None:
    """Without an image, an unknown method was accepted."""
    images = [image(data_url(picture(320, 320)))] if with_image else []
    messages = [user(*images, "what?")]
    reply = server.post(route, {"messages": messages, "visual_tokens": wish})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert message in error["message"]


def test_relevance_metrics(server: Server) -> None:
    large = image(page(3, 640, 960))  # large enough for regions that are kept
    ask(server, large, "read it", visual_tokens={"keep": 0.5})
    samples = server.metrics()
    for name in RELEVANCE_GAUGES:
        assert name.startswith("arr_coc_")
        assert samples[name] > 0
    before = samples["arr_coc_lod_allocation_time_ms_count"]
    for name in RELEVANCE_SPREADS:
        assert samples[f"{name}_count"] > 0
    text = server.get("/metrics").text
    for tension in TENSIONS:
        assert f'{TENSION_GAUGE}{{tension="{tension}"}} 0.' in text
    ask(server, large, "read it", visual_tokens={"method": "dart"})
    assert server.metrics()["arr_coc_lod_allocation_time_ms_count"] == before, (
        "the method dart does not use relevance"
    )
    ask(server, large, "where is it?", visual_tokens={"keep": 0.5})
    after = server.metrics()
    assert after["arr_coc_lod_allocation_time_ms_count"] == before + 1
    assert after["arr_coc_token_allocation_sum"] > samples["arr_coc_token_allocation_sum"]
    assert after["fovea:region_cache_bytes"] > 0
    assert after["fovea:region_cache_hits_total"] > 0
    assert after["fovea:region_cache_misses_total"] > 0


def test_request_overrides_the_policy(folder: Path) -> None:
    with ServerWithSettings(folder, visual_tokens="relevance:0.25") as server:
        (report,) = image_reports(ask(server, image(page()), "what is it?"))
        assert (report["method"], report["visual_tokens"], report["of"]) == ("relevance", FULL // 4, FULL)
        for wish in ({"keep": 1}, {"preset": "document"}):
            (report,) = image_reports(ask(server, image(page()), "what is it?", visual_tokens=wish))
            assert (report.get("method"), report["visual_tokens"]) == (None, FULL)
        (report,) = image_reports(
            ask(server, image(page()), "what is it?", visual_tokens={"method": "dpp", "budget": 9})
        )
        assert (report["method"], report["visual_tokens"]) == ("dpp", 9)
        tokenized = server.post("/tokenize", {"messages": [user(image(page()), "what is it?")]}).json()
        assert tokenized["count"] == ask(server, image(page()), "what is it?")["usage"]["prompt_tokens"]


def test_images_lose_tokens_under_load(folder: Path) -> None:
    """A request that sets the number of tokens keeps it under load."""
    settings = {"degrade_from": 0.5, "degrade_by": "dart", "max_running": 2, "max_queue": 2}
    with ServerWithSettings(folder, **settings) as server:
        (idle,) = image_reports(ask(server, image(page()), "what is it?"))
        assert idle["visual_tokens"] == FULL
        replies: list[Json] = []
        own_number: Json = {"visual_tokens": {"keep": 1}}

        def send(**extra: Any) -> None:
            replies.append(ask(server, image(page()), "what is it?", **extra))

        with frozen(server.engine):
            threads = []
            for number, extra in enumerate(({}, {}, {}, own_number), start=1):
                threads.append(threading.Thread(target=send, kwargs=extra))
                threads[-1].start()
                until(lambda number=number: server.engine.loop._inbox.qsize() >= number)  # type: ignore[misc]
        for thread in threads:
            thread.join(60)
        reports = [image_reports(body)[0] for body in replies]
    counts = sorted(one["visual_tokens"] for one in reports)
    assert counts[0] < FULL
    assert FULL in counts
    lowered = [one for one in reports if one["visual_tokens"] < FULL]
    for one in lowered:
        assert (one["method"], one["of"], one["detail"]) == ("dart", FULL, "high")
        assert "of its tokens at a load of" in one["reason"]
        assert one["visual_tokens"] in (FULL // 2, FULL // 4)
