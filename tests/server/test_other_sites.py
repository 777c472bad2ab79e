"""A server without keys and the web pages of other sites: only its own pages and programs may use it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from fovea.server.app import create_app
from fovea.server.settings import ServerSettings
from tests.server.scripted import Script

EVIL = {"Origin": "https://attacker.example"}
REBOUND = {"Host": "rebound.attacker.example:8000"}
LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}


async def status(
    settings: dict[str, Any], method: str, path: str, headers: dict[str, str]
) -> tuple[int, str | None]:
    """The status and the error's code of one request to a server."""
    app = create_app(Script(), ServerSettings.of(image_workers=0, video_workers=0, pdf_workers=0, **settings))
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        answer = await client.request(method, path, headers=headers)
    is_error = answer.status_code >= 400 and answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json()["error"]["code"] if is_error else None


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"), ("GET", "/admin/caches"), ("DELETE", "/admin/caches/kv"),
        ("GET", "/admin/live"), ("GET", "/metrics"), ("GET", "/version"), ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"), ("POST", "/v1/files"), ("POST", "/v1/images/pdf"),
    ],
)  # fmt: skip
async def test_other_sites_reach_nothing_on_a_server_without_keys(method: str, path: str) -> None:
    """A rebound name read /admin and files, and a page elsewhere could clear caches and generate."""
    assert await status({}, method, path, REBOUND) == (403, "host_not_allowed")
    assert await status({}, method, path, EVIL) == (403, "origin_not_allowed")
    assert (await status({"server_names": ("*.attacker.example",)}, method, path, REBOUND))[0] != 403
    assert (await status({"cors_origins": ("https://attacker.example",)}, method, path, EVIL))[0] != 403
    own = {"Host": "10.0.0.7:8000", "Origin": "http://10.0.0.7:8000", "Sec-Fetch-Site": "same-origin"}
    assert (await status({}, method, path, own))[0] != 403


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/v2/health/live", "/v2/health/ready"])
async def test_probes_may_use_any_name(path: str) -> None:
    """Load balancers and orchestrators choose the Host header of a probe themselves."""
    assert (await status({}, "GET", path, REBOUND))[0] == 200


async def test_links_from_other_sites_lead_to_the_pages() -> None:
    """A link to the chat page may be anywhere; a link to what the server does may not."""
    for path in ("/", "/admin", "/docs"):
        assert (await status({}, "GET", path, LINK))[0] == 200
        assert (await status({}, "GET", path, REBOUND))[0] == 403
    assert await status({}, "GET", "/admin/profile", LINK) == (403, "origin_not_allowed")


async def test_a_server_with_keys_relies_on_them() -> None:
    """No page of another site knows a key. Its clients may use any name of the server, as before."""
    keys = {"api_keys": ("secret",)}
    for headers in (REBOUND, EVIL):
        assert (await status(keys, "GET", "/v1/models", {**headers, "Authorization": "Bearer secret"}))[
            0
        ] == 200
        assert (await status(keys, "GET", "/v1/models", headers))[0] == 401
        assert (await status(keys, "GET", "/", headers))[0] == 200
