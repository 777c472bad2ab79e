"""The pages of a gateway without a browser: who gets them and what they ask for. tests/page opens them."""

from __future__ import annotations

from tests.gateway.support import FakeEngine, running

OTHER_SITE = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}


async def test_pages_can_be_turned_off() -> None:
    async with FakeEngine() as engine, running(engine, page="off") as on:
        for path in ("/", "/admin", "/ui/app.js"):
            assert (await on.client.get(path)).status_code == 404
        assert (await on.client.get("/admin/backends")).status_code == 200


async def test_other_sites_may_link_to_pages_and_change_nothing() -> None:
    """Without keys. A page of another site can make a browser send requests, and could drain a backend."""
    async with FakeEngine("a") as engine, running(engine) as on:
        for path in ("/", "/admin", "/ui/gateway.js"):
            assert (await on.client.get(path, headers=LINK)).status_code == 200
        for method, path in (
            ("GET", "/admin/live"), ("GET", "/admin/keys"), ("POST", "/admin/backends/a/drain"),
            ("POST", "/admin/keys"), ("DELETE", "/admin/keys/12345678"), ("POST", "/"),
        ):  # fmt: skip
            answer = await on.client.request(method, path, headers=OTHER_SITE)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
        rebound = await on.client.get("/admin/live", headers={"host": "evil.example"})
        assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "host_not_allowed")
        assert (await on.backend("a"))["draining"] is False


async def test_a_route_that_is_not_there_names_those_that_are() -> None:
    async with FakeEngine() as engine, running(engine) as on:
        answer = await on.client.get("/admin/nothing")
        assert answer.status_code == 404
        assert "accepted: GET /admin/live, GET /admin/backends, " in answer.json()["error"]["message"]
        assert (await on.client.get("/ui/../app.py")).status_code == 404
