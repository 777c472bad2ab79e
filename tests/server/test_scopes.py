"""With a cache scope of "key", an API key has its own share of every cache; without, all share them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fovea import Engine
from fovea.core.errors import ConfigError
from fovea.media.limits import MediaLimits
from fovea.server.keys import tenant_of_key
from fovea.server.settings import ServerSettings
from tests.server.conftest import Web
from tests.server.support import Json, Server, chat, data_url, image, picture, running, user

CHAT = "/v1/chat/completions"
KEYS = ("first", "second")
STAGES = ("fetch_cache", "decoded_cache", "embed_cache")
LIMITS = MediaLimits(allow_private_hosts=True)


@pytest.fixture(scope="module")
def apart(engine: Engine, files: Path) -> Iterator[Server]:
    with running(engine, ServerSettings(api_keys=KEYS, cache_scope="key", media=LIMITS), files) as server:
        yield server


@pytest.fixture(scope="module")
def together(engine: Engine, files: Path) -> Iterator[Server]:
    with running(engine, ServerSettings(api_keys=KEYS, media=LIMITS), files) as server:
        yield server


def ask(server: Server, path: str, body: Json, key: str) -> Json:
    answer = server.post(path, body, headers={"Authorization": f"Bearer {key}"})
    return {"status": answer.status_code, **answer.json()}


def found(server: Server, web: Web, key: str, salt: str = "") -> list[bool]:
    """Whether a question about the web's picture found it fetched, decoded and encoded, and its prefix computed."""
    before = server.metrics()
    body = chat(user(image(f"{web.url}/a"), "what is it? " * 8), cache_salt=salt)
    usage = ask(server, CHAT, body, key)["usage"]
    after = server.metrics()
    hits = [f"fovea:{stage}_hits_total" for stage in STAGES]
    misses = [f"fovea:{stage}_misses_total" for stage in STAGES]
    kept = [after[name] > before[name] for name in hits]
    if usage["prompt_tokens_details"]["cached_tokens"] == 0:
        made = [after[name] > before[name] for name in misses]
        assert [*map(bool.__xor__, kept, made)] == [True] * 3
    else:
        kept[2] = True  # a prefix that is here needs no encoder output
    return [*kept, usage["prompt_tokens_details"]["cached_tokens"] > 0]


@pytest.fixture
def fresh(web: Web, apart: Server, together: Server) -> Web:
    web.headers = {"Cache-Control": "max-age=60"}
    for server in (apart, together):
        server.app.state.fovea.decoded.cache.clear()
        server.engine.clear_caches()
    return web


def test_every_key_has_its_own_share_of_every_cache(apart: Server, fresh: Web) -> None:
    nothing, everything = [False] * 4, [True] * 4
    assert found(apart, fresh, "first") == nothing
    assert found(apart, fresh, "first") == everything
    assert found(apart, fresh, "second") == nothing
    assert found(apart, fresh, "second") == everything
    assert found(apart, fresh, "first", "salt") == nothing, "a request's own salt parts a key's share again"
    assert found(apart, fresh, "second", "salt") == nothing
    assert found(apart, fresh, "first") == everything


def test_no_salt_leads_into_another_keys_share(apart: Server, fresh: Web) -> None:
    found(apart, fresh, "first")
    theirs = tenant_of_key(b"first")
    for salt in (theirs, f"{theirs}:", "first"):
        assert found(apart, fresh, "second", salt) == [False] * 4


def test_all_keys_share_unless_it_is_said(together: Server, fresh: Web) -> None:
    assert found(together, fresh, "first") == [False] * 4
    assert found(together, fresh, "second") == [True] * 4


def test_an_image_sent_ahead_is_its_keys_alone(apart: Server) -> None:
    sent = {"url": data_url(picture(seed=801)), "encode": False}
    card = ask(apart, "/v1/images", sent, "first")
    assert card["id"] != ask(apart, "/v1/images", sent, "second")["id"]
    body = chat(user(image(card["url"]), "what is it?"))
    assert ask(apart, CHAT, body, "first")["status"] == 200
    refused = ask(apart, CHAT, body, "second")
    assert (refused["status"], refused["error"]["code"]) == (400, "image_not_found")
    tokenized = {"messages": body["messages"]}
    assert ask(apart, "/tokenize", tokenized, "first")["status"] == 200
    assert ask(apart, "/tokenize", tokenized, "second")["error"]["code"] == "image_not_found"
    with apart.client() as client:
        for key, status in (("second", 404), ("first", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.get(f"/v1/images/{card['id']}", headers=headers).status_code == status
            assert client.delete(f"/v1/images/{card['id']}", headers=headers).status_code == status


def test_a_tenant_is_not_its_key_and_outlives_a_restart() -> None:
    assert tenant_of_key(b"first") == tenant_of_key(b"first") != tenant_of_key(b"second")
    assert "first" not in tenant_of_key(b"first")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_scope": "tenant"}, "cache_scope is 'tenant'; accepted: shared, key"),
        ({"cache_scope": "key"}, "keeps API keys apart, and there are none"),
        ({"admin_keys": ("a", " ")}, "one of admin_keys is empty"),
        ({"api_keys": ("",)}, "one of api_keys is empty"),
        ({"fetch_ttl": 0}, "fetch_ttl is 0; accepted: 1 to 2592000"),
        ({"decoded_cache_mib": -1}, "decoded_cache_mib is -1"),
    ],
)
def test_wrong_settings(settings: Json, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**settings)
