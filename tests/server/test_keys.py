"""API keys: /v1 is behind them, what operators ask is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from fovea import Engine
from fovea.server.settings import ServerSettings
from tests.server.support import Server, chat, running

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def locked(engine: Engine, files: Path) -> Iterator[Server]:
    with running(engine, ServerSettings(api_keys=("first-key", "clé")), files) as server:
        yield server


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/openapi.json"])
def test_operators_need_none(locked: Server, path: str) -> None:
    assert locked.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/v1/none", "/tokenize"])
def test_everything_else_does(locked: Server, path: str) -> None:
    answer = locked.get(path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "missing_api_key"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (b"", "missing_api_key"),
        (b"first-key", "missing_api_key"),
        (b"Basic first-key", "missing_api_key"),
        (b"Bearer", "missing_api_key"),
        (b"Bearer wrong", "invalid_api_key"),
        (b"Bearer first-key-and-more", "invalid_api_key"),
        (b"Bearer first", "invalid_api_key"),
        (b"Bearer first-key,second", "invalid_api_key"),
        (b"Bearer \xff\xfe", "invalid_api_key"),
    ],
)
def test_wrong_keys(locked: Server, header: bytes, code: str) -> None:
    answer = locked.post(CHAT, chat(), headers={b"Authorization": header})
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == (code, "authentication_error")
    assert "first-key" not in error["message"]


@pytest.mark.parametrize("key", ["first-key", "clé"])
def test_every_key_opens(locked: Server, key: str) -> None:
    header = b"bearer " + key.encode()
    assert locked.post(CHAT, chat(), headers={b"Authorization": header}).status_code == 200


def test_the_openai_client_sends_it(locked: Server) -> None:
    for key, works in (("first-key", True), ("wrong", False)):
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0) as client:
            if works:
                assert client.models.list().data
            else:
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()
