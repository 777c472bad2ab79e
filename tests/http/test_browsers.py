"""Requests that a web page of another site makes a visitor's browser send to a server without keys."""

from __future__ import annotations

from typing import Any

import pytest

from fovea.core.errors import ConfigError, Forbidden
from fovea.http.browsers import Browsers, with_own_name
from fovea.http.settings import HttpSettings

LOOPBACK, ELSEWHERE = "127.0.0.1", "10.213.16.5"


def verdict(
    rules: Browsers,
    host: str,
    *,
    at: str = ELSEWHERE,
    method: str = "POST",
    page: bool = False,
    **more: str,
) -> str:
    """The code of a request's refusal; "": it was accepted.

    at: address on which the server got it. more: further headers, with _ for -.
    """
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in more.items()]
    pairs += [(b"host", host.encode())] if host else []
    scope: dict[str, Any] = {"method": method, "headers": pairs, "server": (at, 8000)}
    try:
        rules.check(scope, page=page)
    except Forbidden as error:
        return error.code
    return ""


@pytest.mark.parametrize(
    ("host", "accepted"),
    [
        ("127.0.0.1:8000", True), ("10.0.0.7", True), ("[::1]:8000", True), ("[fe80::1%25eth0]", True),
        ("localhost:8000", True), ("LOCALHOST.", True), ("app.localhost", True), ("", True),
        ("vlm.example.com", True), ("vlm.example.com.:8000", True), ("a.b.inner.test", True),
        ("engine-qwen-0:8000", True),
        ("rebound.attacker.example", False), ("vlm.example.com.attacker.example", False),
        ("127.0.0.1.attacker.example", False), ("inner.test", False), ("attackerinner.test", False),
        ("localhost.attacker.example", False), ("127.0.0.1@attacker.example", False),
    ],
)  # fmt: skip
def test_names_that_are_not_the_servers_are_refused(host: str, accepted: bool) -> None:
    """A rebound name made a visitor's browser read /admin and files, as in Ollama's CVE-2024-28224."""
    rules = Browsers(("vlm.example.com", "*.inner.test"))
    assert verdict(rules, host) == ("" if accepted else "host_not_allowed")
    assert verdict(Browsers(("*",)), host) == ""


def test_names_without_a_dot_are_refused_on_the_loopback_interface() -> None:
    """Containers name each other so. On a laptop, a hostile network could give such a name any address."""
    assert verdict(Browsers(()), "engine", at=ELSEWHERE) == ""
    assert verdict(Browsers(()), "engine", at=LOOPBACK) == "host_not_allowed"
    assert verdict(Browsers(("engine",)), "engine", at=LOOPBACK) == ""


@pytest.mark.parametrize(
    ("host", "origin", "accepted"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", True), ("10.0.0.7", "http://10.0.0.7", True),
        ("vlm.example.com", "https://vlm.example.com", True), ("10.0.0.7:80", "http://10.0.0.7", True),
        ("10.0.0.7:8000", "https://vlm.example.com", True), ("10.0.0.7", "https://shop.example.org", True),
        ("127.0.0.1:8000", "http://attacker.example", False), ("127.0.0.1:8000", "null", False),
        ("127.0.0.1:8000", "http://127.0.0.1:3000", False),
        ("127.0.0.1:8000", "http://localhost:8000", False),
        ("127.0.0.1:8000", "http://127.0.0.1:8000.attacker.example", False), ("10.0.0.7", "", False),
        ("10.0.0.7", "http://shop.example.org", False),
    ],
)  # fmt: skip
def test_pages_of_other_sites_are_refused(host: str, origin: str, accepted: bool) -> None:
    """A page elsewhere drained the gateway's backends by a POST whose answer it could not even read."""
    rules = Browsers(("vlm.example.com",), ("https://shop.example.org",))
    assert verdict(rules, host, origin=origin) == ("" if accepted else "origin_not_allowed")
    assert verdict(Browsers((), ("*",)), host="127.0.0.1", origin=origin) == ""


@pytest.mark.parametrize("origin", ["https://attacker.example", "http://vlm.example.com:3000", "null"])
def test_names_do_not_open_the_server_to_other_sites(origin: str) -> None:
    """*: any name, for clouds that choose it. Another port of the same name belongs to another program."""
    for names in ("*",), ("vlm.example.com",):
        assert verdict(Browsers(names), "vlm.example.com", origin=origin) == "origin_not_allowed"
    assert verdict(Browsers(("*",)), "10.0.0.7:8000", origin="http://10.0.0.7:8000") == ""


def test_links_from_other_sites_lead_to_pages_only() -> None:
    """Browsers send no Origin for links, forms that GET, and pictures; they say that the site is another."""
    rules = Browsers(())
    for site, page, method, code in (
        ("cross-site", False, "GET", "origin_not_allowed"), ("cross-site", True, "GET", ""),
        ("cross-site", True, "POST", "origin_not_allowed"), ("same-origin", False, "GET", ""),
        ("none", False, "GET", ""),
    ):  # fmt: skip
        assert verdict(rules, "localhost", method=method, page=page, sec_fetch_site=site) == code


def test_the_name_to_listen_on_is_a_name_of_the_server() -> None:
    assert with_own_name(HttpSettings(), "box.lan").server_names == ("box.lan",)
    for host in ("0.0.0.0", "localhost", "::1", ""):
        assert with_own_name(HttpSettings(), host).server_names == ()
    with pytest.raises(ConfigError, match=r"server_names has 'Box.lan:80'; accepted: \*, or a name in small"):
        HttpSettings(server_names=("Box.lan:80",))


def test_a_refusal_shows_what_was_sent() -> None:
    scope: dict[str, Any] = {"method": "POST", "server": (ELSEWHERE, 8000)}
    rules = Browsers(())
    with pytest.raises(Forbidden, match="the Host header 'vlm.example.com:80' is not a name of this server"):
        rules.check({**scope, "headers": [(b"host", b"vlm.example.com:80")]})
    with pytest.raises(Forbidden, match=r"another site \(Origin: 'http://shop.example.org'\)"):
        rules.check({**scope, "headers": [(b"host", b"10.0.0.7"), (b"origin", b"http://shop.example.org")]})
    with pytest.raises(Forbidden, match=r"another site \(Sec-Fetch-Site: cross-site\)"):
        rules.check({**scope, "headers": [(b"host", b"10.0.0.7"), (b"sec-fetch-site", b"cross-site")]})
