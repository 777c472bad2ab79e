"""A peer that lies, sends garbage or never ends: the answer is right, and others are not delayed.

The peer is an HTTP server of these tests, which speaks the protocol badly. Where a lie needs offers that are
nearly right, an honest engine makes them.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from fovea import Engine
from fovea.core.types import ChatPrompt
from fovea.engine.config import EngineConfig
from fovea.engine.load import LoadedModel, load_model
from fovea.engine.peers import client
from fovea.engine.transfer.connector import Connector, Offer
from fovea.kernels.native.build import library
from tests.engine.test_speculation import Written, answer, written
from tests.support.engines import ask, assert_idle
from tests.support.roles import drawn, line, worked

TIMEOUT_S, PATIENCE = 1.5, 2
"""`peer_timeout_s`, and how many times that a peer is waited for that has nothing but news."""
REQUEST_S = 20.0
"""Many times what a request needs if each of its waits ends as it should."""
KINDS = ("encode", "prefill")
PROMPT = ask("What is in the image?", drawn(1))
TEXT = ask("the red circle is left of the blue square")
EXACT = {"dtype": "bfloat16", "kernels": "native"} if library() is not None else {"dtype": "float32"}
BASE: dict[str, Any] = {
    "device": "cpu", "threads": 1, "kv_blocks": 256, "block_size": 8, "speculate": "off", **EXACT,
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """Hands every request to the peer's lie."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        self.close_connection = True
        with suppress(OSError):
            self.server.lie(Talk(self, self.server.peer, content))

    def log_message(self, *words: Any) -> None:
        """It is quiet."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    peer: LyingPeer
    lie: Callable[[Talk], None]

    def handle_error(self, *words: Any) -> None:
        """Connections break in these tests."""


@dataclass
class Talk:
    """One request to the peer. content: its body."""

    handler: Handler
    peer: LyingPeer
    content: bytes

    def send(self, data: bytes) -> None:
        self.handler.wfile.write(data)
        self.handler.wfile.flush()

    def head(self, status: str = "200 OK", *fields: str) -> None:
        lines = [f"HTTP/1.1 {status}", "content-type: application/x-ndjson", "connection: close", *fields]
        self.send("\r\n".join([*lines, "", ""]).encode())

    def until_left(self, data: Callable[[], bytes], pause: float = 0.0) -> None:
        """Send data until the other side has left, or the test is over."""
        while not self.peer.over.wait(pause):
            self.send(data())

    def honest(self) -> list[dict[str, Any]]:
        """The lines of an honest peer."""
        with worked(self.peer.engine, self.content) as found:
            return [json.loads(each) for each in found.iter_bytes()]

    def reply(self, *lines: dict[str, Any]) -> None:
        self.head()
        for each in lines:
            self.send(line(**each))

    def changed(self, change: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> None:
        """Send an honest answer with other offers: `change` returns those in place of one."""
        self.reply(
            *(
                each | {"offers": [new for old in each["offers"] for new in change(old)]}
                if "offers" in each else each
                for each in self.honest()
            )
        )  # fmt: skip

    def other_bytes(self, change: Callable[[bytearray], bytes]) -> None:
        """Offer other bytes under the right names, with the checksum of these bytes."""
        connector = self.peer.connector

        def other(offer: dict[str, Any]) -> list[dict[str, Any]]:
            found = fetched(connector, offer)
            new = connector.offer(offer["name"], [change(found)])
            assert new is not None
            return [new.to_json()]

        self.changed(other)

    def other_output(self, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
        """Offer another encoder output under the right name. Other values stay as they are."""

        def other(data: bytearray) -> bytes:
            try:
                tensors = safetensors.torch.load(bytes(data))
            except safetensors.SafetensorError:  # it is no encoder output
                return bytes(data)
            self.peer.touched += 1
            return bytes(safetensors.torch.save(change(tensors)))

        self.other_bytes(other)


def fetched(connector: Connector, offer: dict[str, Any]) -> bytearray:
    return connector.fetch(Offer.from_json(offer), 5.0)


@dataclass
class LyingPeer:
    """An honest engine, whose answers are changed.

    over: set at the end of the test. touched: encoder outputs that were changed. asked: requests so far.
    """

    engine: Engine
    url: str
    server: Server
    over: threading.Event = field(default_factory=threading.Event)
    touched: int = 0

    @property
    def connector(self) -> Connector:
        handover = self.engine.parts.peering.handover
        assert handover is not None
        return handover.connector


def embeds(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Talk], None]:
    return lambda talk: talk.other_output(lambda tensors: tensors | {"0": change(tensors["0"])})


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy[-1, -1] = float("nan")
    return copy


def slow_head(talk: Talk) -> None:
    talk.send(b"HTTP/1.1 200 OK\r\nx: ")
    talk.until_left(lambda: b"a", 0.05)


def gzipped(talk: Talk) -> None:
    """A small body that becomes a large one."""
    talk.head("200 OK", "content-encoding: gzip")
    talk.send(bomb())


@cache
def bomb() -> bytes:
    return gzip.compress(bytes(32 << 20), 1)


def endless(data: bytes, pause: float = 0.0, status: str = "200 OK") -> Callable[[Talk], None]:
    def lie(talk: Talk) -> None:
        talk.head(status)
        talk.until_left(lambda: data, pause)

    return lie


def after_done(talk: Talk) -> None:
    talk.reply(*talk.honest())
    talk.until_left(lambda: b"{}\n", 0.05)


def cut(talk: Talk) -> None:
    """Break off after the first offers, with a length that promises more."""
    talk.head("200 OK", "content-length: 100000")
    talk.send(line(**talk.honest()[0]))


def raw(*pieces: bytes) -> Callable[[Talk], None]:
    def lie(talk: Talk) -> None:
        talk.head()
        for piece in pieces:
            talk.send(piece)

    return lie


def status(code: str, *fields: str, body: bytes = b"no") -> Callable[[Talk], None]:
    def lie(talk: Talk) -> None:
        talk.head(code, *fields)
        talk.send(body)

    return lie


def said(**fields: Any) -> Callable[[Talk], None]:
    return lambda talk: talk.reply(fields)


FAILS: dict[str, Callable[[Talk], None]] = {
    "other names": lambda talk: talk.changed(lambda offer: [offer | {"name": "ab" * 32}]),
    "names of a salt": lambda talk: talk.changed(lambda offer: [offer | {"name": offer["name"][::-1]}]),
    "duplicates": lambda talk: talk.changed(lambda offer: [offer, offer]),
    "another connector": lambda talk: talk.changed(lambda offer: [offer | {"connector": "folder"}]),
    "another place": lambda talk: talk.changed(lambda offer: [offer | {"place": "/etc/passwd"}]),
    "another size": lambda talk: talk.changed(lambda offer: [offer | {"size": 1 << 50}]),
    "another checksum": lambda talk: talk.changed(lambda offer: [offer | {"checksum": "0" * 32}]),
    "another lease": lambda talk: talk.changed(lambda offer: [offer | {"lease": 7}]),
    "an offer that is none": lambda talk: talk.changed(lambda offer: [{"name": 5}]),
    "a list for an offer": said(offers=[[1, 2]]),
    "fewer bytes": lambda talk: talk.other_bytes(lambda data: bytes(data[:-64])),
    "more bytes": lambda talk: talk.other_bytes(lambda data: bytes(data) + bytes(64)),
    "no bytes": lambda talk: talk.other_bytes(lambda data: b""),
    "many bytes": lambda talk: talk.other_bytes(lambda data: bytes(32 << 20)),
    "empty lines": endless(b"\n"),
    "news for ever": endless(b"{}\n", 0.05),
    "fast news for ever": endless(b"{}\n" * 1000),
    "bytes for ever": endless(b"x", 0.05),
    "fast bytes for ever": endless(b"x" * 65536),
    "a long line": raw(b'{"x": "', b"x" * (10 << 20), b'"}\n'),
    "no JSON": raw(b"certainly\n"),
    "a list": raw(b"[1]\n"),
    "deep JSON": raw(b"[" * 100_000 + b"\n"),
    "no end": raw(b'{"offers": []}\n'),
    "an empty answer": raw(),
    "cut": cut,
    "nothing": lambda talk: None,
    "a late head": lambda talk: talk.until_left(lambda: b"", 0.1),
    "compressed": gzipped,
    "an error": said(error="it does not work"),
    "an error without words": said(error={"a": ["b"]}),
    "infinitely cached": raw(b'{"done": true, "cached": Infinity}\n'),
    "words for numbers": said(done=True, cached="many"),
    "status 500": status("500 Internal Server Error"),
    "status 500 for ever": endless(b"x" * 4096, 0.01, "500 Internal Server Error"),
    "status 500 slowly": endless(b"x", 0.1, "500 Internal Server Error"),
    "status 401": status("401 Unauthorized"),
    "status 204": status("204 No Content", body=b""),
    "a redirect": status("307 Temporary Redirect", "location: /peer/work"),
}
"""Lies after which a peer rests."""
OF_OUTPUTS: dict[str, Callable[[Talk], None]] = {
    "NaN": embeds(with_nan),
    "infinity": embeds(lambda tensor: tensor * float("inf")),
    "fewer rows": embeds(lambda tensor: tensor[:-1].contiguous()),
    "more rows": embeds(lambda tensor: torch.cat([tensor, tensor[:1]])),
    "no rows": embeds(lambda tensor: tensor[:0].contiguous()),
    "rows of another width": embeds(lambda tensor: tensor[:, :-1].contiguous()),
    "another shape": embeds(lambda tensor: tensor.reshape(-1)),
    "swapped sides": embeds(lambda tensor: tensor.t().contiguous()),
    "another type": embeds(lambda tensor: tensor.to(torch.float64)),
    "integers": embeds(lambda tensor: tensor.view(torch.int16).contiguous()),
    "no tensors": lambda talk: talk.other_output(lambda tensors: {"created": tensors["created"]}),
    "no time": lambda talk: talk.other_output(lambda tensors: {"0": tensors["0"]}),
    "more tensors": lambda talk: talk.other_output(lambda tensors: tensors | {"a": torch.zeros(3)}),
    "many times": lambda talk: talk.other_output(lambda tensors: tensors | {"created": torch.zeros(2)}),
    "a time that is none": lambda talk: talk.other_output(
        lambda tensors: tensors | {"created": torch.tensor(float("nan"), dtype=torch.float64)}
    ),
}
"""Lies about encoder outputs, after which a peer rests."""
HARMLESS: dict[str, Callable[[Talk], None]] = {
    "nothing is offered": said(done=True, cached=0),
    "all is cached": said(done=True, cached=1 << 60),
    "less than nothing is cached": said(done=True, cached=-5),
    "offers that are no list": said(offers={"a": 1}, done=True),
    "half of the offers": lambda talk: talk.changed(lambda offer: [offer] if offer["name"] < "8" else []),
    "the other order": lambda talk: talk.reply(*talk.honest()[:-1][::-1], talk.honest()[-1]),
    "the end first": lambda talk: talk.reply(*talk.honest()[::-1]),
    "unknown fields": lambda talk: talk.reply(*(each | {"more": [1]} for each in talk.honest())),
    "news after the end": after_done,
}
"""Lies that only waste time."""


@pytest.fixture(autouse=True)
def _less_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PATIENCE", PATIENCE)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("fovea-tiny", EngineConfig.of(**BASE))


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> tuple[Written, Written]:
    with Engine(model, EngineConfig.of(**BASE)) as machine:
        return reply(machine, PROMPT), reply(machine, TEXT)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fovea-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, model: LoadedModel, home: Path) -> Iterator[Pair]:
    """An engine with a peer of one kind."""
    kind = request.param
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    common = BASE | {"peer_key": "secret", "transfer_dir": str(home), "transfer_mib": 64}
    role = "decode" if kind == "prefill" else "prefill-decode"
    front = common | {"role": role, f"{kind}_peers": url, "peer_timeout_s": TIMEOUT_S}
    with (
        closed_at_end(server), Engine(model, EngineConfig.of(**common, role="all")) as honest,
        Engine(model, EngineConfig.of(**front, remote_prefill_tokens=12)) as machine,
    ):  # fmt: skip
        server.peer = LyingPeer(honest, url, server)
        yield Pair(kind, machine, server.peer)
        server.shutdown()


def closed_at_end(server: Server) -> Any:
    @contextmanager
    def block() -> Iterator[None]:
        try:
            yield
        finally:
            server.server_close()

    return block()


@dataclass
class Pair:
    """Two engines, of which one lies.

    kind: work of the peer. front: the engine that answers."""

    kind: str
    front: Engine
    peer: LyingPeer

    def wake(self) -> None:
        """Let the peer have all of its credit back."""
        peers = self.front.parts.peering.peers
        assert peers is not None
        for peer in peers._tables[self.kind].peers:
            assert peer.pending == 0
            peer.failures, peer.rests_until = 0, 0.0

    @contextmanager
    def lying(self, lie: Callable[[Talk], None]) -> Iterator[None]:
        self.front.clear_caches()
        self.peer.engine.clear_caches()
        self.peer.over, self.peer.touched = threading.Event(), 0
        self.peer.server.lie = lie
        try:
            yield
        finally:
            self.peer.over.set()
        assert_idle(self.front)
        assert_idle(self.peer.engine)


def reply(machine: Engine, prompt: ChatPrompt) -> Written:
    options = {"max_tokens": 8, "timeout": REQUEST_S, "logprobs": True}
    return written(answer(machine, ((prompt, ()), options)))


def check(pair: Pair, lie: Callable[[Talk], None], expected: tuple[Written, Written]) -> dict[str, float]:
    """Ask about a picture, and meanwhile another question. Returns how figures have changed."""
    pair.wake()
    before = pair.front.stats()
    with pair.lying(lie), ThreadPoolExecutor(2) as pool:
        first = pool.submit(reply, pair.front, PROMPT)
        if pair.kind == "encode":
            time.sleep(0.01)
            assert reply(pair.front, TEXT) == expected[1]
        assert first.result() == expected[0]
        after = pair.front.stats()
        assert reply(pair.front, PROMPT) == expected[0], "what was taken in is wrong"
    return {name: value - before[name] for name, value in after.items() if name in before} | {
        "ready": after[f"peers_{pair.kind}_ready"]
    }


@pytest.mark.parametrize("lie", FAILS)
def test_the_answer_is_right_and_the_peer_rests(
    lie: str, pair: Pair, expected: tuple[Written, Written]
) -> None:
    changes = check(pair, FAILS[lie], expected)
    assert changes[f"peer_{pair.kind}_failed"] == 1
    assert changes["ready"] == 0


@pytest.mark.parametrize("lie", OF_OUTPUTS)
def test_a_wrong_encoder_output_is_not_taken_in(
    lie: str, pair: Pair, expected: tuple[Written, Written]
) -> None:
    if pair.kind == "prefill":
        pytest.skip("a prefill peer offers encoder outputs for images at the end of a prompt only")
    changes = check(pair, OF_OUTPUTS[lie], expected)
    assert pair.peer.touched == 1
    assert changes["peer_encode_failed"] == 1
    assert changes["ready"] == 0


@pytest.mark.parametrize("lie", HARMLESS)
def test_an_answer_that_only_wastes_time_does_no_harm(
    lie: str, pair: Pair, expected: tuple[Written, Written]
) -> None:
    check(pair, HARMLESS[lie], expected)


def test_an_honest_peer_is_used(pair: Pair, expected: tuple[Written, Written]) -> None:
    changes = check(pair, lambda talk: talk.reply(*talk.honest()), expected)
    assert changes[f"peer_{pair.kind}_done"] == 1
    assert changes[f"peer_{pair.kind}_failed"] == 0
    assert changes["transfers"] > 0
