"""API keys: every route needs one of the right kind, except those for probes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fovea import Engine
from fovea.cli.main import main
from fovea.server.settings import ServerSettings
from tests.server.support import Server, chat, running

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def locked(engine: Engine, files: Path) -> Iterator[Server]:
    with running(engine, ServerSettings(api_keys=("first-key", "clé")), files) as server:
        yield server


@pytest.mark.parametrize("path", ["/health", "/ready", "/v2/health/live", "/v2/health/ready"])
def test_probes_need_no_key(locked: Server, path: str) -> None:
    assert locked.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/version", "/openapi.json", "/docs", "/redoc"])
def test_operator_routes_need_a_key_if_there_are_keys(locked: Server, server: Server, path: str) -> None:
    """In the past, everyone could read the metrics of a server with keys: names of models, load, times."""
    assert locked.get(path).status_code == 401
    assert locked.get(path, headers=bearer("first-key")).status_code == 200
    assert server.get(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/v1/models/tiny", "/v1/none", "/tokenize", "/tokenize/", "/v1", "/none", "/v2/chat"],
)
def test_other_routes_need_a_key(locked: Server, path: str) -> None:
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
def test_every_key_is_accepted(locked: Server, key: str) -> None:
    header = b"bearer " + key.encode()
    assert locked.post(CHAT, chat(), headers={b"Authorization": header}).status_code == 200


def test_openai_client_sends_the_key(locked: Server) -> None:
    for key, works in (("first-key", True), ("wrong", False)):
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0) as client:
            if works:
                assert client.models.list().data
            else:
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()


@pytest.fixture(scope="module")
def administered(engine: Engine, files: Path) -> Iterator[Server]:
    settings = ServerSettings(api_keys=("user",), admin_keys=("admin", "boss"))
    with running(engine, settings, files) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/admin/caches", "admin", 200),
        ("/admin/caches", "boss", 200),
        ("/admin/caches", "user", 401),
        ("/admin/caches", "wrong", 401),
        ("/admin/none", "user", 401),
        ("/v1/models", "user", 200),
        ("/v1/models", "admin", 401),
        ("/metrics", "admin", 200),
        ("/metrics", "user", 401),
        ("/version", "user", 200),
        ("/version", "admin", 200),
        ("/docs", "wrong", 401),
    ],
)
def test_admin_key_opens_only_admin_routes(administered: Server, path: str, key: str, status: int) -> None:
    assert administered.get(path, headers=bearer(key)).status_code == status


def test_clearing_needs_an_admin_key(administered: Server) -> None:
    with administered.client() as client:
        error = client.delete("/admin/caches/all").json()["error"]
        assert (error["code"], error["message"][:24]) == ("missing_api_key", "an admin key is required")
        refused = client.delete("/admin/caches/all", headers=bearer("user"))
        assert refused.json()["error"]["message"] == "the admin key is not valid here"
        assert client.delete("/admin/caches/all", headers=bearer("admin")).status_code == 200


def test_without_admin_keys_api_keys_open_admin_routes(locked: Server, server: Server) -> None:
    assert locked.get("/admin/caches", headers=bearer("first-key")).status_code == 200
    assert locked.get("/admin/caches").status_code == 401
    assert server.get("/admin/caches").status_code == 200


def test_admin_keys_alone_leave_other_routes_open(engine: Engine, files: Path) -> None:
    with running(engine, ServerSettings(admin_keys=("admin",)), files) as server:
        assert server.get("/v1/models").status_code == 200
        assert server.get("/admin/caches").status_code == 401


def test_caches_command_reads_keys_from_the_environment(
    administered: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show = ["caches", "--url", administered.url]
    assert main(show) == 2
    assert main([*show, "--api-key", "boss"]) == 0
    monkeypatch.setenv("FOVEA_API_KEY", "admin, other")
    assert main(show) == 0
    monkeypatch.setenv("FOVEA_API_KEY", "user")
    assert main(show) == 2
    assert "the admin key is not valid here" in capsys.readouterr().err
    monkeypatch.setenv("FOVEA_ADMIN_KEY", "admin")
    assert main(show) == 0


def test_every_refusal_is_counted_by_its_code(locked: Server) -> None:
    """In the past, only errors of routes were counted, not wrong keys, large bodies or malformed requests."""
    key = {"Authorization": "Bearer first-key"}
    requests = {
        "missing_api_key": lambda: locked.post(CHAT, chat()),
        "unknown_url": lambda: locked.get("/v1/none", headers=key),
        "method_not_allowed": lambda: locked.get(CHAT, headers=key),
        "model_not_found": lambda: locked.post(CHAT, chat(model="other"), headers=key),
        "unknown_field": lambda: locked.post(CHAT, chat(temprature=1), headers=key),
        "payload_too_large": lambda: locked.post(CHAT, "x" * (65 << 20), headers=key),
    }
    before = refusals(locked)
    codes = {code: send().json()["error"]["code"] for code, send in requests.items()}
    assert codes == {code: code for code in requests}
    after = refusals(locked)
    assert {code: after[code] - before.get(code, 0.0) for code in requests} == dict.fromkeys(requests, 1.0)


def refusals(server: Server) -> dict[str, float]:
    text = server.get("/metrics", headers=bearer("first-key")).text
    families = text_string_to_metric_families(text)
    refused = (sample for family in families for sample in family.samples if "code" in sample.labels)
    return {sample.labels["code"]: sample.value for sample in refused if sample.name.endswith("_total")}
