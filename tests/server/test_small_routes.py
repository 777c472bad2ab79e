"""Routes and headers on which clients rely: /detokenize, /ping, modalities, fingerprints, CORS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fovea import Engine
from fovea.core.errors import ConfigError
from fovea.server.settings import AccessSettings, ServerSettings
from tests.server.support import Server, chat, running

CHAT = "/v1/chat/completions"
ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def shared(engine: Engine, files: Path) -> Iterator[httpx.Client]:
    """A server with a key that pages of one origin may call."""
    settings = ServerSettings(api_keys=("secret",), access=AccessSettings(cors_origins=(ORIGIN,)))
    with running(engine, settings, files) as server, server.client() as client:
        yield client


def test_detokenize_reverses_tokenize(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"prompt": "the red circle"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "the red circle"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_detokenize_refuses_unknown_ids(client: httpx.Client, wrong: int) -> None:
    answer = client.post("/detokenize", json={"tokens": [5, wrong]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens[1]")


def test_ping_and_ready_agree(client: httpx.Client, shared: httpx.Client) -> None:
    assert client.get("/ping").json() == client.get("/ready").json()
    assert client.get("/health").json() == {"status": "ok"}
    assert shared.get("/ping").status_code == 200, "probes have no key"


def test_a_model_says_that_it_takes_images(client: httpx.Client) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert model["input_modalities"][:2] == ["text", "image"]
    assert model["max_model_len"] > 0


def test_answers_name_what_they_depend_on(client: httpx.Client) -> None:
    answers = [client.post(CHAT, json=chat()).json() for _ in range(2)]
    assert answers[0]["system_fingerprint"].startswith("fp_")
    assert answers[0]["system_fingerprint"] == answers[1]["system_fingerprint"]
    text = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()
    assert text["system_fingerprint"] == answers[0]["system_fingerprint"]


def test_a_browser_may_call_from_a_named_origin(shared: httpx.Client) -> None:
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    before = shared.options(CHAT, headers=asked)
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == ORIGIN
    assert "x-stainless-os" in before.headers["access-control-allow-headers"]
    answer = shared.post(CHAT, json=chat(), headers={"Origin": ORIGIN, "Authorization": "Bearer secret"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_a_refusal_can_be_read_by_the_page_too(shared: httpx.Client) -> None:
    answer = shared.post(CHAT, json=chat(), headers={"Origin": ORIGIN})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, ORIGIN)


def test_other_origins_get_no_permission(shared: httpx.Client, client: httpx.Client) -> None:
    for each, origin in ((shared, "https://evil.example"), (client, ORIGIN)):
        answer = each.post(CHAT, json=chat(), headers={"Origin": origin, "Authorization": "Bearer secret"})
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    ["example.org", "https://example.org/", "ftp://a", "https://", "", "https://A.org", "https://*.a.org",
     "https://me@a.org", "https://a.org:x", "https://a b"],
)  # fmt: skip
def test_wrong_origins_are_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="scheme and a host"):
        AccessSettings(cors_origins=(origin,))


def test_a_path_without_names_hides_those_with_names(server: Server) -> None:
    """OpenAPI says so. GET /v1/images/pdf looked for an image of that name, and Allow named its methods."""
    with server.client() as client:
        for method in ("OPTIONS", "GET"):
            answer = client.request(method, "/v1/images/pdf")
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        described = client.get("/openapi.json").json()["paths"]["/admin/profile"]["get"]["responses"]["200"]
        assert set(described["content"]) == {"application/json", "image/svg+xml", "text/plain"}
