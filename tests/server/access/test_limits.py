"""Limits of keys on a running server: refusals that a client can act on; no client starves the others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fovea import Engine
from fovea.access.bucket import TokenBucket
from fovea.server.clients import Client
from fovea.server.settings import ServerSettings
from tests.core.test_ledger import Clock
from tests.server.access.test_access import entry
from tests.server.conftest import Web
from tests.server.support import Json, Server, chat, data_url, frozen, image, picture, running, until, user

CHAT = "/v1/chat/completions"
KEYS = {
    "alice": ("requests_per_minute = 600", "tokens_per_minute = 60000"),
    "zoe": ("requests_per_minute = 60", "tokens_per_minute = 60000"),
    "carol": ("min_priority = 0", "max_n = 2", "max_timeout_s = 30"),
    "dave": ("cache_share = 0.1",),
    "erin": (),
    "frank": ("places = 1",),
}


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-of-{name}"}


def write_keys(path: Path, **keys: tuple[str, ...]) -> Path:
    path.write_text("".join(entry(name, f"key-of-{name}", *lines) for name, lines in keys.items()))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def limited(engine: Engine, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", **KEYS)
    settings = ServerSettings.of(
        keys_file=path, cache_scope="key", image_store_mib=1, allow_private_hosts=True
    )
    with running(engine, settings, files) as server:
        yield server


def client_of(server: Server, name: str) -> Client:
    found: Client = next(client for client in server.app.state.access.clients if client.name == name)
    return found


def ask(server: Server, name: str, body: Json | None = None, path: str = CHAT) -> httpx.Response:
    return server.post(path, body or chat(), headers=bearer(name))


def test_an_openai_client_waits_and_recovers(limited: Server) -> None:
    clock = Clock()
    client_of(limited, "zoe").requests = bucket = TokenBucket(60, clock)
    bucket.charge(60)
    refusals: list[httpx.Response] = []

    def wait(response: httpx.Response) -> None:
        """Let as much time pass on the server's clock as it asks for."""
        if response.status_code == 429:
            refusals.append(response)
            clock.now += int(response.headers["retry-after"])

    http = httpx.Client(event_hooks={"response": [wait]})
    messages: Any = [{"role": "user", "content": "hello"}]
    for retries in (1, 0):
        with openai.OpenAI(
            base_url=f"{limited.url}/v1", api_key="key-of-zoe", max_retries=retries, http_client=http
        ) as client:
            if retries:
                client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
                http = httpx.Client(event_hooks={"response": [wait]})
                continue
            with pytest.raises(openai.RateLimitError) as error:
                client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
    assert len(refusals) == 2
    assert error.value.code == "rate_limit_exceeded"
    assert "key 'zoe' may use 60 requests per minute (requests_per_minute)" in error.value.message
    names = ("retry-after", *(f"x-ratelimit-{word}-requests" for word in ("limit", "remaining", "reset")))
    assert [error.value.response.headers[name] for name in names] == ["1", "60", "0", "1m0s"]
    assert "x-ratelimit-remaining-tokens" in error.value.response.headers


def test_a_full_answer_is_charged(limited: Server) -> None:
    alice = client_of(limited, "alice")
    body = chat(user(image(data_url(picture(seed=32))), "what is it?"), max_tokens=4)
    charged: list[float] = []
    settle = alice.settle_tokens
    alice.settle_tokens = lambda held, used: charged.append(used) or settle(held, used)  # type: ignore[func-returns-value,method-assign]
    try:
        usage = ask(limited, "alice", body).json()["usage"]
        ask(limited, "alice", {**body, "stream": True})
        ask(limited, "alice", {"url": data_url(picture(seed=33))}, "/v1/images")
    finally:
        del alice.settle_tokens
    assert usage["prompt_tokens_details"]["image_tokens"] > 0
    assert charged[:2] == [usage["prompt_tokens"] + usage["completion_tokens"]] * 2
    assert charged[2] > 0, "visual tokens of an image sent ahead count, too"


def test_a_request_with_many_prompts_is_checked_once(limited: Server) -> None:
    """Otherwise its later prompts would find the bucket empty, however long the client waited before."""
    erin = client_of(limited, "erin")
    erin.tokens = TokenBucket(10, Clock())
    body = {"prompt": ["a"] * 8, "max_tokens": 4, "ignore_eos": True}
    assert ask(limited, "erin", body, "/v1/completions").status_code == 200
    refused = ask(limited, "erin", body, "/v1/completions")
    assert refused.status_code == 429
    assert erin.tokens.level <= 10 - 8 * 4, "all of them are charged"
    assert int(refused.headers["retry-after"]) >= 6 * 22
    erin.tokens = None


@pytest.mark.parametrize(
    ("extra", "param", "limit"),
    [
        ({"n": 3}, "n", "at most 2 at once (max_n)"),
        ({"priority": -1}, "priority", "0 and larger numbers (min_priority)"),
        ({"timeout": 31}, "timeout", "at most 30 s (max_timeout_s)"),
    ],
)
def test_what_a_key_may_not_ask_for_is_refused(limited: Server, extra: Json, param: str, limit: str) -> None:
    answer = ask(limited, "carol", chat(**extra))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "key_limit_exceeded")
    assert limit in error["message"]
    assert ask(limited, "erin", chat(**extra)).status_code == 200
    assert client_of(limited, "carol").places == 0


def test_one_client_does_not_evict_what_another_sent_ahead(limited: Server) -> None:
    """In the past, one client could fill the store for images, and everyone else's images were gone."""
    upload = {"url": data_url(picture(180, 180, seed=40)), "encode": False}
    card = ask(limited, "erin", upload, "/v1/images").json()
    for seed in range(41, 53):
        small = {"url": data_url(picture(180, 180, seed=seed)), "encode": False}
        assert ask(limited, "dave", small, "/v1/images").status_code == 200
    assert limited.get(f"/v1/images/{card['id']}", headers=bearer("erin")).status_code == 200
    large = {"url": data_url(picture(250, 200, seed=81)), "encode": False}
    assert ask(limited, "dave", large, "/v1/images").status_code == 400, "larger than dave's share alone"
    assert ask(limited, "erin", large, "/v1/images").status_code == 200


def test_places_of_a_key(limited: Server, web: Web) -> None:
    slow = chat(user(image(f"{web.url}/slow"), "hi"))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, limited, "frank", slow)
        until(lambda: client_of(limited, "frank").places == 1)
        refused = ask(limited, "frank")
        assert refused.status_code == 429
        assert "key 'frank' has 1 choices in flight and requests 1 more; accepted: at most 1" in refused.text
        assert int(refused.headers["retry-after"]) >= 1
        assert ask(limited, "erin").status_code == 200
        web.released.set()
        assert first.result().status_code == 200
    until(lambda: client_of(limited, "frank").places == 0)
    assert ask(limited, "frank").status_code == 200


def test_one_client_cannot_take_all_places(checkpoint: Path, files: Path, tmp_path: Path) -> None:
    """In the past, one key could fill the whole queue, and every other client got 429 until it was done."""
    path = write_keys(tmp_path / "keys.toml", greedy=(), modest=())
    with (
        Engine.from_pretrained(
            str(checkpoint), dtype="float32", threads=1, kv_blocks=40, max_running=9, max_queue=1
        ) as engine,
        running(engine, ServerSettings.of(keys_file=path), files) as server,
        ThreadPoolExecutor(12) as pool,
    ):
        greedy = client_of(server, "greedy")
        with frozen(engine):
            waiting = [pool.submit(ask, server, "greedy") for _ in range(4)]
            until(lambda: greedy.places == 4)
            refused = ask(server, "greedy")
            assert refused.status_code == 429
            assert "accepted: 4, half of the answers that are computed at a time" in refused.text
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            waiting += [pool.submit(ask, server, "modest") for _ in range(3)]
            until(lambda: client_of(server, "modest").places == 3)
            refused = ask(server, "modest")
            assert refused.status_code == 429, "three places are left, and it holds three"
            assert "at most as many as stay free for other keys (max_places_per_key)" in refused.text
        assert [future.result().status_code for future in waiting] == [200] * 7
        until(lambda: greedy.places == 0)


def test_a_number_of_places_per_key_and_a_single_key(engine: Engine, files: Path, tmp_path: Path) -> None:
    alone = ServerSettings.of(keys_file=write_keys(tmp_path / "keys.toml", alice=()))
    with running(engine, alone, files) as server:
        assert not server.app.state.access.fair
    with running(engine, ServerSettings.of(api_keys=("a", "b"), max_places_per_key=2), files) as server:
        assert not server.app.state.access.fair
        answer = server.post(CHAT, chat(n=3), headers={"Authorization": "Bearer a"})
        assert answer.status_code == 400
        assert "key 'api-key:1' may have at most 2 in flight (max_places_per_key)" in answer.text


def test_a_key_that_is_removed_opens_nothing_at_once(engine: Engine, files: Path, tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.toml", alice=(), bob=())
    with running(engine, ServerSettings.of(keys_file=path), files) as server:
        assert server.get("/v1/models", headers=bearer("bob")).status_code == 200
        write_keys(path, alice=())
        until(lambda: server.get("/v1/models", headers=bearer("bob")).status_code == 401)
        assert server.get("/v1/models", headers=bearer("alice")).status_code == 200


def test_unlimited_clients_get_no_headers_of_limits(limited: Server) -> None:
    answer = ask(limited, "erin")
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
