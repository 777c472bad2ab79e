"""With the cache scope "key", each API key has its own entries in every cache.

Otherwise all keys share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fovea import Engine
from fovea.access.keys import tenant_of_key
from fovea.core.errors import ConfigError
from fovea.media.limits import MediaLimits
from fovea.media.sandbox.process import WorkerNotStarted
from fovea.server.settings import AccessSettings, ServerSettings
from tests.server.conftest import Web
from tests.server.support import Json, Server, chat, data_url, image, picture, running, user

CHAT = "/v1/chat/completions"
KEYS = ("first", "second")
STAGES = ("fetch_cache", "decoded_cache", "embed_cache")
LIMITS = MediaLimits(allow_private_hosts=True)
OPEN = AccessSettings(open_metrics=True)


@pytest.fixture(scope="module")
def separate(engine: Engine, files: Path) -> Iterator[Server]:
    settings = ServerSettings(api_keys=KEYS, cache_scope="key", access=OPEN, media=LIMITS)
    with running(engine, settings, files) as server:
        yield server


@pytest.fixture(scope="module")
def shared(engine: Engine, files: Path) -> Iterator[Server]:
    with running(engine, ServerSettings(api_keys=KEYS, access=OPEN, media=LIMITS), files) as server:
        yield server


def ask(server: Server, path: str, body: Json, key: str) -> Json:
    answer = server.post(path, body, headers={"Authorization": f"Bearer {key}"})
    return {"status": answer.status_code, **answer.json()}


def cache_hits(server: Server, web: Web, key: str, salt: str = "") -> list[bool]:
    """Whether a question about the web's picture hit each cache: fetched, decoded, encoded, prefix."""
    before = server.metrics()
    body = chat(user(image(f"{web.url}/a"), "what is it? " * 8), cache_salt=salt)
    usage = ask(server, CHAT, body, key)["usage"]
    after = server.metrics()
    hit_names = [f"fovea:{stage}_hits_total" for stage in STAGES]
    miss_names = [f"fovea:{stage}_misses_total" for stage in STAGES]
    hits = [after[name] > before[name] for name in hit_names]
    if usage["prompt_tokens_details"]["cached_tokens"] == 0:
        misses = [after[name] > before[name] for name in miss_names]
        assert [*map(bool.__xor__, hits, misses)] == [True] * 3
    else:
        hits[1] = hits[2] = True  # a cached prefix needs neither pixels nor an encoder output
    return [*hits, usage["prompt_tokens_details"]["cached_tokens"] > 0]


@pytest.fixture
def fresh(web: Web, separate: Server, shared: Server) -> Web:
    web.headers = {"Cache-Control": "max-age=60"}
    for server in (separate, shared):
        server.app.state.decoded_cache.clear()
        server.engine.clear_caches()
    return web


def test_every_key_has_its_own_entries_in_every_cache(separate: Server, fresh: Web) -> None:
    nothing, everything = [False] * 4, [True] * 4
    assert cache_hits(separate, fresh, "first") == nothing
    assert cache_hits(separate, fresh, "first") == everything
    assert cache_hits(separate, fresh, "second") == nothing
    assert cache_hits(separate, fresh, "second") == everything
    assert cache_hits(separate, fresh, "first", "salt") == nothing, (
        "a request's own salt separates entries of one key, too"
    )
    assert cache_hits(separate, fresh, "second", "salt") == nothing
    assert cache_hits(separate, fresh, "first") == everything


def test_no_salt_reaches_entries_of_another_key(separate: Server, fresh: Web) -> None:
    cache_hits(separate, fresh, "first")
    tenant = tenant_of_key(b"first")
    for salt in (tenant, f"{tenant}:", "first"):
        assert cache_hits(separate, fresh, "second", salt) == [False] * 4


def test_keys_share_caches_by_default(shared: Server, fresh: Web) -> None:
    assert cache_hits(shared, fresh, "first") == [False] * 4
    assert cache_hits(shared, fresh, "second") == [True] * 4


def test_uploaded_image_belongs_to_one_key(separate: Server) -> None:
    upload = {"url": data_url(picture(seed=801)), "encode": False}
    card = ask(separate, "/v1/images", upload, "first")
    assert card["id"] != ask(separate, "/v1/images", upload, "second")["id"]
    body = chat(user(image(card["url"]), "what is it?"))
    assert ask(separate, CHAT, body, "first")["status"] == 200
    refused = ask(separate, CHAT, body, "second")
    assert (refused["status"], refused["error"]["code"]) == (400, "image_not_found")
    tokenized = {"messages": body["messages"]}
    assert ask(separate, "/tokenize", tokenized, "first")["status"] == 200
    assert ask(separate, "/tokenize", tokenized, "second")["error"]["code"] == "image_not_found"
    with separate.client() as client:
        for key, status in (("second", 404), ("first", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.get(f"/v1/images/{card['id']}", headers=headers).status_code == status
            assert client.delete(f"/v1/images/{card['id']}", headers=headers).status_code == status


def test_keys_share_no_decoder(separate: Server, shared: Server) -> None:
    """A decoder that a picture of one key had taken over could see the pictures of the next key."""

    def tenants(server: Server) -> set[str]:
        for number, key in enumerate((*KEYS, *KEYS)):
            upload = {"url": data_url(picture(seed=810 + number)), "encode": False}
            assert ask(server, "/v1/images", upload, key)["status"] == 200
        return {worker.tenant for worker in server.app.state.media._decoder.images.processes}

    assert {tenant_of_key(key.encode()) for key in KEYS} <= tenants(separate)
    assert tenants(shared) == {""}


def test_a_picture_without_a_decoder_is_503(shared: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the picture is decoded for an upload or for a question: it is not the client's fault."""

    def fail(*_: object) -> None:
        raise WorkerNotStarted("no memory")

    monkeypatch.setattr(shared.app.state.media._decoder.images, "_free", [])
    monkeypatch.setattr("fovea.media.sandbox.pool.WorkerProcess", fail)
    upload = {"url": data_url(picture(seed=820)), "encode": False}
    for path, body in (("/v1/images", upload), (CHAT, chat(user(image(upload["url"]), "what is it?")))):
        refused = ask(shared, path, body, "first")
        assert (refused["status"], refused["error"]["code"]) == (503, "decoder_unavailable")


def test_tenant_hides_its_key_and_is_stable() -> None:
    assert tenant_of_key(b"first") == tenant_of_key(b"first") != tenant_of_key(b"second")
    assert "first" not in tenant_of_key(b"first")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_scope": "tenant"}, "cache_scope is 'tenant'; accepted: shared, key"),
        ({"cache_scope": "key"}, "separates the caches of API keys, and there are no keys"),
        ({"admin_keys": ("a", " ")}, "admin_keys has ' '; accepted: keys that are not empty"),
        ({"api_keys": ("",)}, "api_keys has ''; accepted: keys that are not empty"),
        ({"fetch_ttl": 0}, "fetch_ttl is 0; accepted: 1 to 2592000"),
        ({"decoded_cache_mib": -1}, "decoded_cache_mib is -1"),
    ],
)
def test_wrong_settings(settings: Json, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**settings)
