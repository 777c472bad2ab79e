"""Fetcher with a fake resolver and transport: URLs that the policy refuses, and the requests it sends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import metadata

import httpx
import pytest

from fovea import __version__
from fovea.core.errors import Forbidden, FoveaError, InvalidImage
from fovea.media.fetch.fetcher import Fetcher
from fovea.media.limits import MediaLimits
from tests.media.internet import PNG, PUBLIC, Internet, fails


async def test_connects_to_the_checked_address_with_the_name_in_host_and_tls() -> None:
    net = Internet({"images.example": [PUBLIC]})
    assert await net.fetcher().fetch("https://images.example/a%20b.png?x=1#top") == PNG
    (request,) = net.requests
    assert str(request.url) == f"https://{PUBLIC}/a%20b.png?x=1"
    assert request.headers["host"] == "images.example"
    assert request.extensions["sni_hostname"] == "images.example"
    assert request.headers["user-agent"] == f"fovea/{__version__}"
    assert request.headers["accept-encoding"] == "identity"
    assert {"cookie", "authorization", "referer"}.isdisjoint(request.headers)
    assert net.lookups == ["images.example"]


async def test_ipv6_and_international_names() -> None:
    net = Internet({"xn--fa-hia.example": ["2606:4700::1111"]})
    await net.fetcher().fetch("https://faß.example/")
    assert str(net.requests[0].url) == "https://[2606:4700::1111]/"
    assert net.requests[0].headers["host"] == "xn--fa-hia.example"


async def test_dns_rebinding_has_no_effect() -> None:
    """The name resolves to a private address after the first answer. No connection goes to that address."""
    net = Internet({"evil.example": [PUBLIC]})

    def rebind(request: httpx.Request) -> httpx.Response:
        net.names["evil.example"] = ["127.0.0.1"]
        return httpx.Response(302, headers={"location": "/again"})

    net.answer = rebind
    error = await fails(net.fetcher(), "http://evil.example/", Forbidden, "is not a public host")
    assert [request.url.host for request in net.requests] == [PUBLIC]
    assert "127.0.0.1" not in error.message


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["10.1.2.3"],
        ["169.254.169.254"],
        ["::1"],
        ["::ffff:192.168.0.1"],
        ["fe80::1%eth0"],
        [PUBLIC, "10.0.0.1"],
        ["2606:4700::1111", "::1"],
    ],
)
async def test_private_addresses(addresses: list[str]) -> None:
    net = Internet({"inner.example": addresses})
    error = await fails(
        net.fetcher(), "http://inner.example/", Forbidden, "'inner.example' is not a public host"
    )
    assert error.code == "url_not_allowed"
    assert net.requests == []
    assert not any(address in error.message for address in addresses)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "2130706433", "0x7f.1", "0x7f000001", "0177.0.0.1", "127.1", "0", "localhost", "[::1]",
     "[::ffff:127.0.0.1]", "169.254.169.254", "127.0.0.1.", "①②⑦.⓪.⓪.①"],
)  # fmt: skip
async def test_odd_spellings_of_loopback_with_the_real_resolver(host: str) -> None:
    def unreachable(request: httpx.Request) -> httpx.Response:
        raise AssertionError(f"connected to {request.url}")

    fetcher = Fetcher(MediaLimits(), transport=httpx.MockTransport(unreachable))
    with pytest.raises((Forbidden, InvalidImage)):
        await fetcher.fetch(f"http://{host}/")


@pytest.mark.parametrize(
    ("url", "kind", "fragment"),
    [
        ("http://user:secret@images.example/", Forbidden, "user name or password"),
        ("http://images.example:8080/", Forbidden, "port 8080; accepted: 80, 443"),
        ("http://images.example:22/", Forbidden, "port 22"),
        ("ftp://images.example/", Forbidden, "'ftp'; accepted: http, https"),
        ("file:///etc/passwd", Forbidden, "'file'"),
        ("http:///a.png", InvalidImage, "no host"),
        ("http://", InvalidImage, "no host"),
        ("http://images.example:99999999/", InvalidImage, "port 99999999; accepted: 1 to 65535"),
        ("http://images.example:0/", InvalidImage, "port 0"),
        ("http://images.example:http/", InvalidImage, "malformed"),
        ("http://[::1/", InvalidImage, "malformed"),
        ("http://images.example/a b.png", InvalidImage, "percent-encoded"),
        ("http://images.example\\@evil.example/", InvalidImage, "backslash"),
        ("http://images.example/\r\nX-Evil: 1", InvalidImage, "control character"),
        ("http://images.example/\x00", InvalidImage, "control character"),
        ("http://images.example/" + "a" * 9000, InvalidImage, "accepted: at most 8192"),
        ("http://images.example/" + "ß" * 8000, InvalidImage, "has 48022 characters"),
        ("http://images.example/\ud800" + "ß" * 8000, InvalidImage, "has 48031 characters"),
        ("http://" + "ß" * 1000 + "/", InvalidImage, "malformed"),
        ("http://images.example:" + "9" * 8000, InvalidImage, "malformed"),
        ("http://" + "a" * 8000 + ".example/", InvalidImage, "cannot be resolved"),
        ("http://unknown.example/", InvalidImage, "'unknown.example' cannot be resolved"),
        ("http://empty.example/", InvalidImage, "cannot be resolved"),
        ("http://xn--/", InvalidImage, "cannot be resolved"),
    ],
)
async def test_urls_refused(url: str, kind: type[FoveaError], fragment: str) -> None:
    net = Internet({"images.example": [PUBLIC], "empty.example": []})
    error = await fails(net.fetcher(), url, kind, fragment)
    assert net.requests == []
    assert "secret" not in error.message
    assert len(error.message) < 250


async def test_allowed_hosts() -> None:
    limits = MediaLimits(allowed_hosts=("images.example", "*.cdn.example"))
    names = (
        "images.example",
        "IMAGES.example.",
        "a.cdn.example",
        "cdn.example",
        "evilcdn.example",
        "other.example",
    )
    net = Internet({name.lower(): [PUBLIC] for name in names})
    for host in names[:3]:
        assert await net.fetcher(limits).fetch(f"https://{host}/") == PNG
    for host in names[3:]:
        await fails(net.fetcher(limits), f"https://{host}/", Forbidden, f"'{host}'", "not an allowed host")
    net.names["images.example"] = ["10.0.0.1"]  # an allowed name must not resolve to a private address either
    await fails(net.fetcher(limits), "https://images.example/", Forbidden, "not a public host")


async def test_remote_can_be_turned_off() -> None:
    await fails(
        Internet({}).fetcher(MediaLimits(allow_remote=False)), "https://a.example/", Forbidden, "turned off"
    )


@pytest.mark.parametrize(
    ("location", "kind", "fragment"),
    [
        ("http://images.example/", Forbidden, "redirects from https to http"),
        ("https://inner.example/", Forbidden, "'inner.example' is not a public host"),
        ("https://10.0.0.1/", Forbidden, "not a public host"),
        ("https://user@images.example/", Forbidden, "user name"),
        ("https://images.example:6379/", Forbidden, "port 6379"),
        ("file:///etc/passwd", Forbidden, "'file'"),
        ("data:image/png;base64,AAAA", Forbidden, "'data'"),
        ("gopher://images.example/", Forbidden, "'gopher'"),
        ("https://images.example:port/", InvalidImage, "malformed"),
        ("", InvalidImage, "answered 302 without a Location header"),
        ("/loop", InvalidImage, "redirects more than 3 times"),
    ],
)
async def test_redirects_refused(location: str, kind: type[FoveaError], fragment: str) -> None:
    net = Internet(
        {"images.example": [PUBLIC], "inner.example": ["192.168.0.9"], "10.0.0.1": ["10.0.0.1"]},
        lambda _: httpx.Response(302, headers={"location": location}),
    )
    await fails(net.fetcher(), "https://images.example/", kind, fragment)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_followed_and_checked_again(status: int) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/final":
            return httpx.Response(200, content=PNG)
        return httpx.Response(status, headers={"location": "https://b.example/final", "set-cookie": "a=1"})

    net = Internet({"a.example": [PUBLIC], "b.example": ["1.1.1.1"]}, answer)
    assert await net.fetcher().fetch("http://a.example/start") == PNG
    assert net.lookups == ["a.example", "b.example"]
    assert net.requests[1].url.host == "1.1.1.1"
    assert net.requests[1].headers["host"] == "b.example"
    assert {"cookie", "referer"}.isdisjoint(net.requests[1].headers)


async def test_next_address_when_the_first_does_not_connect() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "1.1.1.1":
            raise httpx.ConnectError("refused by 1.1.1.1")
        return httpx.Response(200, content=PNG)

    net = Internet({"two.example": ["1.1.1.1", PUBLIC], "one.example": ["1.1.1.1"]}, answer)
    assert await net.fetcher().fetch("http://two.example/") == PNG
    error = await fails(net.fetcher(), "http://one.example/", InvalidImage, "failed (ConnectError)")
    assert error.code == "image_fetch_failed"
    assert "1.1.1.1" not in error.message


async def test_the_timeout_includes_name_resolution() -> None:
    async def slow(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(60)
        return []

    fetcher = Fetcher(MediaLimits(fetch_timeout_s=0.05), resolve=slow)
    await fails(fetcher, "http://a.example/", InvalidImage, "did not arrive within 0.05 s")


async def test_user_agent_of_a_source_tree_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    net = Internet({"images.example": [PUBLIC]})
    await net.fetcher().fetch("https://images.example/")
    assert net.requests[0].headers["user-agent"] == "fovea"
