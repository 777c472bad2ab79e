"""One exchange over ASGI: bodies are received and refused, and answers are written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.api.cut_texts import restore
from fovea.core.errors import (
    FoveaError,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    Unauthorized,
    Unavailable,
)
from fovea.http.bodies import BodyBudget, UnsupportedEncoding
from fovea.http.exchange import Exchange
from fovea.http.refusals import ClientGone
from tests.gateway.samples import run

MIB = 1024 * 1024
JSON = (b"content-type", b"application/json")


class Wire:
    """The two ends of an exchange. slices: the body as it arrives; None: the client leaves."""

    def __init__(
        self, *slices: bytes | None, headers: list[tuple[bytes, bytes]] | None = None, path: str = "/v1/x"
    ) -> None:
        self.slices = list(slices)
        self.more = True
        self.messages: list[MutableMapping[str, Any]] = []
        scope = {
            "type": "http", "path": path, "method": "POST", "client": ("1.2.3.4", 5),
            "headers": [JSON] if headers is None else headers,
        }  # fmt: skip
        self.exchange = Exchange(scope, self._receive, self._send)

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self.slices:
            await asyncio.Event().wait()  # the client waits for its answer
        data = self.slices.pop(0)
        if data is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": data, "more_body": self.more and bool(self.slices)}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.messages.append(message)

    def value(self, budget: BodyBudget | None = None) -> Any:
        """Receive the body, and return its value."""

        async def receive() -> Any:
            bodies = budget or BodyBudget(64 * MIB, 16 * MIB)
            return restore((await self.exchange.receive_json(bodies, "tenant")).finish(), lambda _: None)

        return run(receive())

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])


VALUE = {"model": "m", "text": "é" * 200, "list": [1, {"a": None}]}


@given(st.lists(st.integers(0, 400), max_size=8))
def test_a_body_in_any_slices(cuts: list[int]) -> None:
    data, slices, at = json.dumps(VALUE).encode(), [], 0
    for cut in sorted(cuts):
        slices.append(data[at:cut])
        at = max(at, cut)
    assert Wire(*slices, data[at:]).value() == VALUE


@pytest.mark.parametrize(
    "kind", [b"application/json", b"Application/JSON; charset=utf-8", b"application/vnd.api+json"]
)
def test_types_of_json(kind: bytes) -> None:
    assert Wire(b"{}", headers=[(b"content-type", kind), (b"content-encoding", b"identity")]).value() == {}


@pytest.mark.parametrize(
    ("headers", "kind"),
    [
        ([], InvalidRequest),
        ([(b"content-type", b"text/plain")], InvalidRequest),
        ([(b"content-type", b"multipart/form-data; a=application/json")], InvalidRequest),
        ([JSON, (b"content-encoding", b"gzip")], UnsupportedEncoding),
        ([JSON, (b"content-encoding", b" BR ")], UnsupportedEncoding),
        ([JSON, (b"content-length", str(17 * MIB).encode())], PayloadTooLarge),
    ],
)
def test_headers_are_refused_before_the_body_is_read(headers: Any, kind: type[FoveaError]) -> None:
    wire = Wire(b"{}", headers=headers)
    with pytest.raises(kind):
        wire.value()
    assert wire.slices == [b"{}"]


def test_a_body_that_is_larger_than_it_says() -> None:
    wire = Wire(b'{"a":"', b"x" * 600_000, b"x" * 600_000, b'"}')
    with pytest.raises(PayloadTooLarge, match="1 MiB"):
        wire.value(BodyBudget(4 * MIB, MIB))
    assert len(wire.slices) == 1


def test_a_client_that_leaves_before_the_end() -> None:
    with pytest.raises(ClientGone):
        Wire(b'{"a"', None).value()


def test_a_client_that_leaves_after_the_body_ends_the_work() -> None:
    wire, ended = Wire(b"{}", None), []
    wire.more = False

    async def answer() -> None:
        await wire.exchange.receive_json(BodyBudget(MIB, MIB), "tenant")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    run(wire.exchange.run(answer))
    assert (wire.exchange.code, wire.exchange.gone, wire.exchange.status) == ("client_gone", True, 0)
    assert ended == [True]
    assert wire.messages == []


def test_a_request_that_is_cut_gets_an_error_and_gives_its_body_back() -> None:
    budget = BodyBudget(MIB, MIB)
    wire = Wire(b'"' + b"x" * 200_000 + b'"')

    async def answer() -> None:
        await wire.exchange.receive_json(budget, "tenant")
        assert budget.held > 0
        asyncio.get_running_loop().call_soon(wire.exchange.cut, "the server is shutting down")
        await asyncio.Event().wait()

    run(wire.exchange.run(answer))
    assert (wire.exchange.status, budget.held) == (503, 0)
    assert "shutting down" in json.loads(wire.messages[1]["body"])["error"]["message"]


def test_a_defect_is_an_error_without_details(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire()

    async def answer() -> None:
        raise ZeroDivisionError("secret")

    run(wire.exchange.run(answer))
    assert wire.exchange.status == 500
    assert b"secret" not in wire.messages[1]["body"]
    assert "secret" in caplog.text


def test_a_defect_after_the_answer_has_begun_closes_the_connection() -> None:
    wire = Wire()

    async def answer() -> None:
        await wire.exchange.start(200, {})
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(wire.exchange.run(answer))


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (b"abc-1.2:3_Z", True),
        (b"x" * 128, True),
        (b"x" * 129, False),
        (b"", False),
        (b"a b", False),
        (b"a\n", False),
    ],
)
def test_ids_of_requests(sent: bytes, kept: bool) -> None:
    made = Wire(headers=[(b"x-request-id", sent)]).exchange.request_id
    assert (made == sent.decode()) == kept
    assert kept or made.startswith("req_")


def test_of_several_headers_with_one_name_the_first_counts() -> None:
    exchange = Wire(headers=[(b"a", b"1"), (b"a", b"2"), (b"b", b"\xe9")]).exchange
    assert (exchange.header(b"a"), exchange.header(b"b"), exchange.header(b"c")) == ("1", "é", "")
    assert (exchange.method, exchange.path) == ("POST", "/v1/x")


def test_an_answer() -> None:
    wire = Wire()
    wire.exchange.extra["x-fovea-backend"] = "a\r\nset-cookie: x\u2028"
    run(wire.exchange.reply(201, b"{}", {"x-more": "1"}))
    assert wire.exchange.status == 201
    assert wire.headers[b"content-length"] == b"2"
    assert wire.headers[b"x-more"] == b"1"
    assert wire.headers[b"x-fovea-backend"] == b"a??set-cookie: x?"
    assert wire.headers[b"x-request-id"] == wire.exchange.request_id.encode()
    assert [message.get("more_body") for message in wire.messages] == [None, False]


@pytest.mark.parametrize(
    ("error", "status", "name", "value"),
    [
        (Overloaded("full", retry_after=1.2), 429, b"retry-after", b"2"),
        (Unavailable("none"), 503, b"retry-after", b"5"),
        (Unauthorized("no key"), 401, b"www-authenticate", b"Bearer"),
        (InvalidRequest("wrong", param="model"), 400, b"content-type", b"application/json"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_errors(error: FoveaError, status: int, name: bytes, value: bytes, path: str) -> None:
    wire = Wire(path=path)
    run(wire.exchange.refuse(error))
    body = json.loads(wire.messages[1]["body"])
    assert wire.messages[0]["status"] == status
    assert wire.headers[name] == value
    assert body["error"]["message"] == error.message
    assert ("type" in body) == (path == "/v1/messages")
