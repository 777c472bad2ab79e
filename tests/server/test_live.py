"""/admin/live: a snapshot for the page for operators, with bounds, and without keys, prompts or URLs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fovea import Engine
from fovea.core.types import ChatPrompt, GenerationRequest, Message, TextPart, TextPrompt
from fovea.media.limits import MediaLimits
from fovea.server.app import create_app
from fovea.server.generation import Generation
from fovea.server.routes.admin import MOST_REQUESTS, MOST_SLOW, MOST_TENANTS, SLOW, snapshot
from fovea.server.settings import ServerSettings
from fovea.server.starting import StartingClient
from fovea.server.state import ServerState
from fovea.server.tracking import InFlight, quantile
from tests.core.test_ledger import Clock
from tests.server.conftest import Web
from tests.server.scripted import talker
from tests.server.support import (
    Json,
    Server,
    chat,
    data_url,
    frozen,
    image,
    picture,
    request_of,
    running,
    until,
    user,
)

CHAT = "/v1/chat/completions"
LIVE = "/admin/live"
CONNECTIONS = dict.fromkeys(
    ("connections_open", "connections_idle", "connections_capacity", "connections_accepted"), 1.0
)


@pytest.fixture(scope="module")
def administered(engine: Engine, files: Path) -> Iterator[Server]:
    settings = ServerSettings(
        api_keys=("user-key", "other-key"),
        admin_keys=("admin-key",),
        media=MediaLimits(allow_private_hosts=True),
    )
    with running(engine, settings, files) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def unstarted() -> StartingClient:
    """An engine that never begins to load."""
    return StartingClient("eyes", lambda: pytest.fail("it is not started"), lambda: None)


def live(server: Server, key: str = "admin-key") -> Json:
    return server.get(LIVE, headers=bearer(key)).json()  # type: ignore[no-any-return]


def state_of(server: Server) -> ServerState:
    state: ServerState = server.app.state
    return state


def tenants(server: Server) -> dict[str, Json]:
    return {row["name"]: row for row in live(server)["tenants"]["rows"]}


@pytest.mark.parametrize(
    ("headers", "status"),
    [(bearer("admin-key"), 200), (bearer("user-key"), 401), (bearer("none"), 401), ({}, 401)],
)
def test_only_an_admin_key_opens_it(administered: Server, headers: dict[str, str], status: int) -> None:
    assert administered.get(LIVE, headers=headers).status_code == status


def test_a_snapshot_of_an_idle_server(server: Server) -> None:
    """Without keys it is open, as all of /admin is; nothing may keep a copy of it."""
    assert server.post(CHAT, chat(user(image(data_url(picture(seed=901))), "what?"))).status_code == 200
    answer = server.get(LIVE)
    assert answer.headers["cache-control"] == "no-store"
    body = answer.json()
    assert body["engine"]["status"] == "ready"
    assert body["engine"]["reason"] is None
    assert body["engine"]["model"] == server.engine.info.name
    assert (body["queue"]["running"], body["queue"]["waiting"], body["queue"]["loading"]) == (0, 0, 0)
    assert body["requests"] == {"total": 0, "rows": []}
    assert body["counters"]["generated_tokens"] >= 4
    assert body["first_token"]["count"] >= 1
    assert 0 < body["first_token"]["p50_seconds"] <= body["first_token"]["p95_seconds"]
    assert body["connections"]["open"] >= 1
    assert [row["name"] for row in body["tenants"]["rows"]] == ["-"], "clients are not told apart"
    assert body["tenants"]["rows"][0]["requests"] >= 1


def test_the_caches_are_those_of_the_other_report(server: Server) -> None:
    server.post(CHAT, chat(user(image(data_url(picture(seed=902))), "what?")))
    rows = {row.pop("name"): row for row in server.get(LIVE).json()["caches"]}
    report = server.get("/admin/caches").json()["stages"]
    assert list(rows) == [*report, "answers"]
    for name, values in report.items():
        for figure in rows[name].keys() & values.keys():
            assert rows[name][figure] == values[figure], (name, figure)
    assert rows["kv"]["unit"] == "tokens"
    assert rows["kv"]["hits"] + rows["kv"]["misses"] == report["kv"]["query_tokens"]
    assert len({tuple(row) for row in rows.values()}) == 1, "all rows have the same fields"


def test_requests_are_shown_while_the_engine_has_them(administered: Server) -> None:
    """An image's URL with a secret, a prompt, a salt and the keys are in no snapshot."""
    body = chat(
        user(image(data_url(picture(seed=903))), "private question"), max_tokens=9, cache_salt="salty"
    )
    headers = bearer("user-key") | {"x-request-id": "request-7"}
    with frozen(administered.engine):
        asking = threading.Thread(target=administered.post, args=(CHAT, body), kwargs={"headers": headers})
        asking.start()
        until(lambda: live(administered)["requests"]["total"] == 1)
        shown = live(administered)
        text = json.dumps(shown)
    asking.join()
    (row,) = shown["requests"]["rows"]
    assert row.pop("seconds") >= 0
    assert row.pop("number") >= 1
    assert row == {
        "id": "request-7",
        "caller": "api-key:1",
        "stage": "waiting",
        "images": 1,
        "choices": 1,
        "tokens": 0,
    }
    assert next(row for row in shown["tenants"]["rows"] if row["name"] == "api-key:1")["in_flight"] == 1
    for secret in ("user-key", "other-key", "admin-key", "private question", "salty", "base64"):
        assert secret not in text
    until(lambda: live(administered)["requests"]["total"] == 0)


async def test_an_abandoned_answer_is_shown_while_it_streams_and_is_charged() -> None:
    """Its usage is unknown, so that the tokens of its prompt are an estimate."""
    app = create_app(talker("many words"))
    state = app.state
    request, _ = request_of(app)
    state.access.authenticate(CHAT, b"", request.caller)
    prompt = ChatPrompt((Message("user", (TextPart("12345678"),)),))
    request.reserve(1)
    deltas = Generation(request, GenerationRequest("g1", prompt)).deltas()
    await anext(deltas)
    await anext(deltas)
    (row,) = snapshot(state)["requests"]["rows"]
    assert (row["id"], row["stage"], row["tokens"]) == ("test", "generating", 2)
    await deltas.aclose()
    shown = snapshot(state)
    assert shown["requests"]["total"] == 0
    (tenant,) = shown["tenants"]["rows"]
    assert (tenant["prompt_tokens"], tenant["completion_tokens"], tenant["share"]) == (2, 2, 1.0)


def test_a_url_and_its_query_string_are_not_shown(administered: Server, web: Web) -> None:
    body = chat(user(image(f"{web.url}/slow?token=hidden"), "what?"))
    asking = threading.Thread(
        target=administered.post, args=(CHAT, body), kwargs={"headers": bearer("user-key")}
    )
    asking.start()
    assert web.requested.wait(60)
    shown = live(administered)
    web.released.set()
    asking.join()
    assert shown["queue"]["loading"] == 1
    for words in (json.dumps(shown), json.dumps(live(administered))):
        assert "hidden" not in words
        assert web.url not in words


def test_tenants_are_charged_for_computed_tokens(engine: Engine, files: Path) -> None:
    settings = ServerSettings(api_keys=("one", "two"), admin_keys=("admin-key",))
    with running(engine, settings, files) as server:
        for seed, (key, tokens) in enumerate((("one", 4), ("two", 16))):
            words = chat(user(image(data_url(picture(seed=904 + seed))), "what?"), max_tokens=tokens)
            server.post(CHAT, words, headers=bearer(key))
        assert server.post(CHAT, chat(max_tokens=0), headers=bearer("one")).status_code == 400
        assert server.post(CHAT, chat(), headers=bearer("wrong")).status_code == 401
        rows = tenants(server)
    assert list(rows) == ["api-key:2", "api-key:1"], "who used most comes first"
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    first, second = rows["api-key:1"], rows["api-key:2"]
    assert (first["requests"], first["refused"], first["images"]) == (2, 1, 1)
    assert (second["requests"], second["refused"], second["images"]) == (1, 0, 1)
    assert (first["completion_tokens"], second["completion_tokens"]) == (4, 16)
    assert first["prompt_tokens"] > first["cached_tokens"]


def test_slow_requests_are_shown_without_their_content(engine: Engine, files: Path) -> None:
    """Every request is slow here. Its picture has a size in the row, and nothing else."""
    settings = ServerSettings.of(slow_request_s=1e-6, api_keys=("user-key",), admin_keys=("admin-key",))
    body = chat(user(image(data_url(picture(96, 64, seed=906))), "private question"))
    with running(engine, settings, files) as server:
        server.post(f"{CHAT}?token=hidden", body, headers=bearer("user-key"))
        until(lambda: live(server)["slow"] != [])
        (row,) = live(server)["slow"]
    assert (row["route"], row["caller"], row["status"]) == (CHAT, "api-key:1", 200)
    assert (row["images"][0]["width"], row["images"][0]["height"]) == (96, 64)
    assert row["stages"]["decode"] > 0
    for secret in ("private question", "hidden", "user-key", "base64"):
        assert secret not in json.dumps(row)


def test_a_draining_server_says_so(administered: Server) -> None:
    state_of(administered).draining = True
    try:
        engine = live(administered)["engine"]
    finally:
        state_of(administered).draining = False
    assert (engine["status"], engine["reason"]) == ("draining", "the server is shutting down")


async def test_a_server_that_is_loading_has_a_snapshot() -> None:
    app = create_app(unstarted())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.get(LIVE)
    assert answer.status_code == 200
    assert answer.json()["engine"]["status"] == "loading"


def test_calls_every_second_are_not_in_the_metrics(server: Server) -> None:
    server.get(LIVE)
    server.get("/admin/caches")
    exposition = server.get("/metrics").text
    assert 'route="/admin/caches"' in exposition
    assert 'route="/admin/live"' not in exposition


class SlowRows:
    """Slow requests in any number, each with a field that the page must not get."""

    def __init__(self, count: int) -> None:
        self._count = count

    def rows(self) -> list[dict[str, Any]]:
        plain = dict.fromkeys(SLOW, 0)
        return [plain | {"seconds": float(number), "prompt": "text"} for number in range(self._count)]


def test_a_snapshot_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """More clients, requests and slow requests than a page can show do not make it larger."""
    many = 3 * max(MOST_REQUESTS, MOST_TENANTS)
    settings = ServerSettings(api_keys=tuple(f"key{number}" for number in range(many)))
    app = create_app(unstarted(), settings)
    state: ServerState = app.state
    generations = [
        Generation(request_of(app)[0], GenerationRequest("g", TextPrompt("a"))) for _ in range(many)
    ]
    for generation in generations:
        generation.number = state.in_flight.add(generation)
    state.access.clients[-1].totals.prompt_tokens = 7
    monkeypatch.setattr(state.tracking, "slow", SlowRows(many))
    shown = snapshot(state)
    assert (shown["requests"]["total"], len(shown["requests"]["rows"])) == (many, MOST_REQUESTS)
    assert shown["requests"]["rows"][0]["number"] == 1, "the oldest come first"
    assert (shown["tenants"]["total"], len(shown["tenants"]["rows"])) == (many, MOST_TENANTS)
    assert shown["tenants"]["rows"][0]["name"] == f"api-key:{many}", "who used most comes first"
    assert [row["seconds"] for row in shown["slow"]] == [many - 1 - number for number in range(MOST_SLOW)]
    assert all(set(row) == set(SLOW) for row in shown["slow"])


def test_times_to_first_token_are_those_of_the_window() -> None:
    clock = Clock()
    flights = InFlight(clock)
    for seconds in (9.0, 1.0, 2.0, 3.0, 4.0):
        flights.count_first_token(seconds)
        clock.now += 10
    assert flights.first_token_times(45) == [1.0, 2.0, 3.0, 4.0]
    assert (flights.first_tokens, flights.first_token_seconds) == (5, 19.0)
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.95) == 4.0
    assert quantile([], 0.5) is None
