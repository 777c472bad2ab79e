"""How an engine asks its peers: what it does not ask, what it does while none answers, and how it ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fovea.api.errors import error_body
from fovea.core.errors import FoveaError, InvalidImage, InvalidRequest
from fovea.engine.config import EngineConfig
from fovea.engine.load import LoadedModel, load_model
from fovea.engine.peers import client as peers_client
from fovea.engine.peers.choose import Peer
from fovea.engine.peers.client import LONGEST_LINE, PeerFailed, PeerRefused, Peers, _lines, _refusal
from fovea.server.routes import peers as routes
from tests.engine.peers.test_lying_peers import BASE
from tests.support.engines import ask, picture
from tests.support.roles import Answer, drawn, line, team

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("fovea-tiny", EngineConfig.of(**BASE))


def test_images_before_a_cached_prefix_are_not_encoded_elsewhere(model: LoadedModel) -> None:
    prompt = ask("What is in the image?", drawn(1))
    with team("encode", model, BASE) as members:
        first = members.front.generate(prompt, **GREEDY)
        assert len(members.asked["encode"]) == 1
        members.front.clear_caches("encoder", "pixels")
        again = members.front.generate(prompt, **GREEDY)
        assert len(members.asked["encode"]) == 1
        assert again.token_ids == first.token_ids
        assert again.usage.cached > 0


def test_pictures_without_a_file_and_known_ones_are_not_sent(model: LoadedModel) -> None:
    with team("prefill", model, BASE) as members:
        members.front.generate(ask("What is it?", picture(1)), **GREEDY)
        assert not members.asked
    with team("encode", model, BASE) as members:
        members.front.generate(ask("What is it?", picture(1), drawn(2), drawn(2)), **GREEDY)
        (body,) = members.asked["encode"]
        assert len(body["images"]) == 1
        members.front.generate(ask("And this?", drawn(2)), **GREEDY)
        assert len(members.asked["encode"]) == 1


def test_a_short_prompt_and_one_that_is_cached_are_computed_here(model: LoadedModel) -> None:
    prompt = ask("the red circle is left of the blue square " * 4)
    with team("prefill", model, BASE, remote_prefill_tokens=30) as members:
        members.front.generate(ask("hi"), **GREEDY)
        assert not members.asked
        members.front.generate(prompt, **GREEDY)
        members.front.generate(prompt, **GREEDY)
        assert len(members.asked["prefill"]) == 1


def test_requests_that_wait_for_a_thread_end_when_the_engine_stops(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_client, "THREADS", 1)
    asked, stopped = threading.Event(), threading.Event()

    def hang(self: Peers, peer: Peer, path: str, content: bytes, **more: str) -> Answer:
        asked.set()
        stopped.wait(30)
        return Answer(lambda: iter(()), 500)

    with (
        ThreadPoolExecutor(1) as pool, team("encode", model, BASE) as members,
        pytest.MonkeyPatch.context() as patch,
    ):  # fmt: skip
        patch.setattr(Peers, "_open", hang)
        prompt = ask("compare", drawn(1), drawn(2), drawn(3))
        waiting = pool.submit(members.front.generate, prompt, timeout=20, **GREEDY)
        assert asked.wait(10)
        threading.Timer(0.2, stopped.set).start()
        members.front.shutdown()
        with pytest.raises(FoveaError, match="stopped"):
            waiting.result()


def test_many_offers_are_sent_in_short_lines() -> None:
    """A prompt of 100,000 cached tokens has more offers than a line may have."""
    offer = {
        "connector": "shm", "place": "/tmp/fovea-1000/fovea-1234567-01234567.sock", "name": "ab" * 32,
        "size": 1 << 21, "checksum": "0" * 32, "start": 1 << 28, "lease": 1 << 52,
    }  # fmt: skip
    assert len(json.dumps(offer)) * routes.LINE_OFFERS < LONGEST_LINE // 4
    found = list(_lines(iter([line(offers=[offer] * routes.LINE_OFFERS) * 200])))
    assert sum(len(each["offers"]) for each in found) == routes.LINE_OFFERS * 200


def split(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_are_read_however_they_are_cut(size: int) -> None:
    data = line(offers=[]) + line() + line(done=True, cached=3)
    assert list(_lines(split(data, size))) == [{"offers": []}, {}, {"done": True, "cached": 3}]


@pytest.mark.parametrize("data", [b"\n", b"[]\n", b"5\n", b"{\n", b"\xff\n", b"nul\n", b"[" * 99_999 + b"\n"])
def test_other_lines_are_refused(data: bytes) -> None:
    with pytest.raises(PeerFailed):
        list(_lines(iter([line(), data])))


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory() -> None:
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        while True:
            read += 65536
            yield b"x" * 65536

    with pytest.raises(PeerFailed, match="more than"):
        list(_lines(endless()))
    assert read < 2 * LONGEST_LINE


def body_of(error: FoveaError) -> str:
    return json.dumps(error_body(error))


@pytest.mark.parametrize(("status", "text", "kind"), [
    (400, body_of(InvalidImage("is damaged", index=0)), PeerRefused),
    (413, body_of(InvalidRequest("is too large")), PeerRefused),
    (400, body_of(InvalidRequest("wrong kind", param="kind")), PeerFailed),
    (400, body_of(InvalidRequest("works for no peers", param="kind")), PeerFailed),
    (400, "no JSON", PeerFailed),
    (400, '{"error": 5}', PeerFailed),
    (400, '{"error": {"message": 1, "param": null}}', PeerFailed),
    (401, body_of(InvalidRequest("no")), PeerFailed),
    (429, body_of(InvalidRequest("no")), PeerFailed),
    (500, body_of(InvalidRequest("no")), PeerFailed),
])  # fmt: skip
def test_only_what_concerns_the_request_lets_a_peer_go_on(status: int, text: str, kind: type) -> None:
    assert type(_refusal(status, text)) is kind
