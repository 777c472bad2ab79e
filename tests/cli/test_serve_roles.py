"""fovea serve --role: processes that work for each other over HTTP and shared memory, and may die or stop."""

from __future__ import annotations

import base64
import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import PIL.Image
import pytest

from tests.support.forks import Fork
from tests.support.servers import forked, free_port
from tests.support.thorough import others_slow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory of Linux")
WAIT_S = 60.0
CHAT = "/v1/chat/completions"
KEY = "a secret of all peers"
TIMEOUT_S = 1.5
ROLES = ("all", "encode", "prefill", "decode", "prefill-decode")
USUAL = (
    "--threads", "1", "--kv-cache-mib", "32", "--speculate", "off", "--remote-prefill-tokens", "16",
    "--peer-timeout-s", str(TIMEOUT_S), "--transfer-mib", "16", "--lame-duck-s", "0", "--drain-seconds", "1",
)  # fmt: skip


class Node:
    """A server with a role, which can end and start again at its port."""

    def __init__(self, home: Path, name: str, *words: str) -> None:
        self.port, self.name, self.words = free_port(), name, words
        self.url = f"http://127.0.0.1:{self.port}"
        self._home, self._stack = home, ExitStack()
        self.process: Fork | None = None

    def start(self) -> None:
        words = ["serve", "fovea-tiny", *USUAL, "--transfer-dir", str(self._home / "shm"), *self.words]
        log = self._home / f"{self.name}.log"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FOVEA_PEER_KEY", KEY)
            server = forked([*words, "--port", str(self.port)], self.port, log)
            self.process = self._stack.enter_context(server)
        until(self.is_ready)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        self._stack.close()
        self.process = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process from running: it accepts connections, and answers nothing."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def post(self, body: Any, path: str = CHAT, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=WAIT_S, **options)

    def metrics(self) -> dict[str, float]:
        """All metrics without labels, by their names in `observe.table`."""
        lines = httpx.get(f"{self.url}/metrics", timeout=WAIT_S).text.splitlines()
        pairs = (text.split(" ") for text in lines if "{" not in text and not text.startswith("#"))
        return {name.removeprefix("fovea:").removesuffix("_total"): float(value) for name, value in pairs}

    def metric(self, name: str) -> float:
        return self.metrics()[name]

    @property
    def files(self) -> int:
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def until(condition: Callable[[], bool], seconds: float = WAIT_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never became true"
        time.sleep(0.02)


@cache
def picture_url(seed: int, width: int = 96, height: int = 64) -> str:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


LONG_TEXT = "Describe the pictures: " + "what is left of it? " * 4


def question(*seeds: int, text: str = LONG_TEXT, **options: Any) -> Any:
    """A question that no request asked before, unless its seeds and options are equal."""
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": picture_url(seed)}} for seed in seeds]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return {"messages": [message], "max_tokens": 12, "temperature": 0, "logprobs": True, **options}


def content(answer: httpx.Response) -> Any:
    """An answer without what differs between two equal requests."""
    body = answer.json()
    for name in ("id", "created", "fovea", "system_fingerprint"):
        body.pop(name, None)
    body.get("usage", {}).pop("prompt_tokens_details", None)
    return answer.status_code, body


Nodes = Mapping[str, Node]


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fovea-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def nodes(home: Path) -> Iterator[Nodes]:
    found = {"all": Node(home, "all"), "encode": Node(home, "encode", "--role", "encode")}
    encode = ("--encode-peers", found["encode"].url)
    found["prefill"] = Node(home, "prefill", "--role", "prefill", *encode)
    prefill = ("--prefill-peers", found["prefill"].url)
    found["decode"] = Node(home, "decode", "--role", "decode", *prefill, *encode)
    found["prefill-decode"] = Node(home, "prefill-decode", "--role", "prefill-decode", *encode)
    try:
        for node in found.values():
            node.start()
        yield found
    finally:
        for node in found.values():
            node.stop()


@pytest.fixture(autouse=True)
def _all_awake(nodes: Nodes) -> None:
    """Let every test begin with peers that run and do not rest."""
    for name in ("encode", "prefill"):
        if nodes[name].process is None:
            nodes[name].start()
    for name in ("decode", "prefill-decode", "prefill"):
        until(lambda name=name: nodes[name].metric("peers_encode_ready") == 1)  # type: ignore[misc]
    until(lambda: nodes["decode"].metric("peers_prefill_ready") == 1)


def same(nodes: Nodes, name: str, body: Any, **more: Any) -> None:
    assert content(nodes[name].post(body | more)) == content(nodes["all"].post(body))


SEEDS = iter(range(10, 1 << 20))


def fresh(count: int = 1) -> list[int]:
    """Seeds of pictures that no request has had."""
    return [next(SEEDS) for _ in range(count)]


@pytest.mark.parametrize("name", ["decode", "prefill-decode"])
def test_answers_are_those_of_one_server(name: str, nodes: Nodes) -> None:
    before = {role: node.metrics() for role, node in nodes.items()}
    for seeds in (fresh(), fresh(2), []):
        body = question(*seeds)
        same(nodes, name, body)
        same(nodes, name, body)
        same(nodes, name, body, n=1, user="another")
    after = {role: node.metrics() for role, node in nodes.items()}
    kind = "prefill" if name == "decode" else "encode"

    def change(role: str, metric: str) -> float:
        return after[role][metric] - before[role][metric]

    assert change(name, f"peer_{kind}_done") == 3
    assert change(name, f"peer_{kind}_failed") == change(name, f"peer_{kind}_refused") == 0
    assert change(name, "transfers") > 0
    assert change("encode", "offers") + change("prefill", "offers") >= change(name, "transfers")
    assert change(kind, "offers_refused") == 0
    assert change(name, f"peer_{kind}_seconds") > 0
    if name == "decode":
        assert change(name, "values_adopted") > 0
        assert change("prefill", "peer_encode_done") == 3, "the prefill engine has images encoded, too"


def test_roles_refuse_what_they_do_not_do(nodes: Nodes) -> None:
    for role in ("encode", "prefill"):
        for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/v1/files"):
            refused = nodes[role].post(question(), path)
            assert refused.status_code == 403, (role, path, refused.text)
            assert refused.json()["error"]["code"] == "role"
        assert httpx.get(f"{nodes[role].url}/v1/models").status_code == 200
    headers = {"authorization": f"Bearer {KEY}"}
    work = {"kind": "prefill", "layout": "x", "id": "a", "ids": [1, 2], "first": 0}
    assert nodes["encode"].post(work, "/peer/work", headers=headers).status_code == 403
    assert nodes["decode"].post(work, "/peer/work", headers=headers).status_code in (401, 403, 404)
    refused = nodes["prefill"].post(work, "/peer/work", headers=headers)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "layout"


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}])
def test_a_peer_without_the_key_gets_nothing(header: dict[str, str], nodes: Nodes) -> None:
    work = {"kind": "encode", "layout": "x", "id": "a"}
    for role in ROLES:
        refused = nodes[role].post(work, "/peer/work", headers=header)
        assert refused.status_code == 401, role
        assert KEY not in refused.text


def test_the_key_is_shown_nowhere(nodes: Nodes, home: Path) -> None:
    for role in ROLES:
        for path in (
            "/version",
            "/health",
            "/metrics",
            "/v1/models",
            "/openapi.json",
            "/admin/live",
            "/ready",
        ):
            assert KEY not in httpx.get(f"{nodes[role].url}{path}").text
        assert KEY not in (home / f"{role}.log").read_text()


MISFITS = ("--peer-key", "another"), ("--dtype", "float32"), ("--block-size", "8"), ("--kv-dtype", "int8")


@pytest.mark.parametrize("words", others_slow(MISFITS, [MISFITS[0], MISFITS[2]]), ids=" ".join)
def test_peers_that_do_not_fit_are_not_used(words: tuple[str, ...], nodes: Nodes, home: Path) -> None:
    peers = ("--encode-peers", nodes["encode"].url, "--prefill-peers", nodes["prefill"].url)
    node = Node(home, f"misfit{words[0]}", *peers, *words)
    node.start()
    try:
        body = question(*fresh())
        answer = node.post(body)
        assert answer.status_code == 200
        if words[0] != "--dtype" and words[0] != "--kv-dtype":
            assert content(answer) == content(nodes["all"].post(body))
        figures = node.metrics()
        assert (figures["peer_prefill_done"], figures["peer_prefill_failed"]) == (0, 1)
        images = words[0] in ("--block-size", "--kv-dtype")  # these decide about keys and values alone
        assert (figures["peer_encode_done"], figures["peer_encode_failed"]) == ((1, 0) if images else (0, 1))
        assert figures["transfers"] == int(images)
    finally:
        node.stop()


@pytest.mark.parametrize("name", ["decode", "prefill-decode"])
def test_a_peer_that_stops_is_waited_for_only_so_long(name: str, nodes: Nodes) -> None:
    kind = "prefill" if name == "decode" else "encode"
    body = question(*fresh())
    with nodes[kind].stopped():
        answer = nodes[name].post(body | {"timeout": 4 * TIMEOUT_S})
        again = nodes[name].post(question(*fresh()) | {"timeout": TIMEOUT_S})  # it rests: nobody waits for it
    assert again.status_code == 200, again.text
    assert content(answer) == content(nodes["all"].post(body))
    until(lambda: nodes[name].metric(f"peers_{kind}_ready") == 1)
    done = nodes[name].metric(f"peer_{kind}_done")
    same(nodes, name, question(*fresh()))
    assert nodes[name].metric(f"peer_{kind}_done") == done + 1


@pytest.mark.parametrize("name", ["decode", "prefill-decode"])
def test_a_peer_may_die_and_start_again(name: str, nodes: Nodes) -> None:
    kind = "prefill" if name == "decode" else "encode"
    bodies = [question(*fresh(4)) for _ in range(8)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = [pool.submit(nodes[name].post, body) for body in bodies]
        time.sleep(0.2)
        nodes[kind].kill()
        found = [content(answer.result()) for answer in answers]
    assert found == [content(nodes["all"].post(body)) for body in bodies]
    nodes[kind].start()
    until(lambda: nodes[name].metric(f"peers_{kind}_ready") == 1)
    done = nodes[name].metric(f"peer_{kind}_done")
    same(nodes, name, question(*fresh()))
    assert nodes[name].metric(f"peer_{kind}_done") == done + 1


def test_the_work_of_a_client_who_leaves_ends(nodes: Nodes) -> None:
    long = question(*fresh(), text="what is above this one and left of it " * 700)
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{nodes['decode'].url}{CHAT}", json=long, timeout=0.4)
    until(lambda: nodes["prefill"].metric("requests_running") == 0, 10)
    until(lambda: nodes["decode"].metric("requests_running") == 0, 10)
    assert nodes["decode"].metric("peers_prefill_ready") == 1, "a client who leaves is no failure of the peer"
    same(nodes, "decode", question(*fresh()))


def test_a_damaged_picture_is_no_failure_of_the_peer(nodes: Nodes) -> None:
    """A client could otherwise keep all peers resting."""
    data = base64.b64decode(picture_url(fresh()[0], 256, 256).partition(",")[2])
    damaged = f"data:image/png;base64,{base64.b64encode(data[: len(data) // 2]).decode()}"
    body = question()
    body["messages"][0]["content"].insert(0, {"type": "image_url", "image_url": {"url": damaged}})
    for name, kind in (("decode", "prefill"), ("prefill-decode", "encode")):
        assert nodes[name].post(body).status_code == 400
        assert nodes[name].metric(f"peers_{kind}_ready") == 1, name


def test_a_long_name_of_a_request_is_no_failure_of_the_peer(nodes: Nodes) -> None:
    same_id = {"x-request-id": "a" * 128}
    body = question(*fresh())
    answer = nodes["decode"].post(body, headers=same_id)
    assert content(answer) == content(nodes["all"].post(body))
    assert nodes["decode"].metric("peers_prefill_ready") == 1


@pytest.mark.parametrize("options", [
    {"priority": 5}, {"cache_salt": "s" * 256}, {"cache_salt": "ä\n"}, {"timeout": 0.9}, {"timeout": 90000},
    {"n": 2, "seed": 4, "temperature": 1}, {"visual_tokens": {"method": "dpp", "keep": 0.5}},
], ids=str)  # fmt: skip
def test_what_clients_may_send_peers_accept(options: dict[str, Any], nodes: Nodes) -> None:
    for name, kind in (("decode", "prefill"), ("prefill-decode", "encode")):
        failed = nodes[name].metric(f"peer_{kind}_failed")
        body = question(*fresh()) | options
        expected = nodes["all"].post(body)
        answer = nodes[name].post(body)
        assert content(answer) == content(expected)
        assert nodes[name].metric(f"peer_{kind}_failed") == failed
        if expected.status_code == 200:
            assert nodes[name].metric(f"peer_{kind}_done") > 0


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own_has_peers(nodes: Nodes, home: Path) -> None:
    words = ("--role", "decode", "--prefill-peers", nodes["prefill"].url, "--engine-process", "on")
    node = Node(home, "own", *words)
    node.start()
    try:
        for body in (question(*fresh()), question(*fresh(2))):
            assert content(node.post(body)) == content(nodes["all"].post(body))
        figures = node.metrics()
        assert figures["peer_prefill_done"] == 2
        assert figures["peer_prefill_failed"] == 0
    finally:
        node.stop()


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own_works_for_others(nodes: Nodes, home: Path) -> None:
    worker = Node(home, "worker", "--role", "prefill", "--engine-process", "on")
    worker.start()
    node = Node(home, "asking", "--role", "decode", "--prefill-peers", worker.url)
    node.start()
    try:
        body = question(*fresh(2))
        assert content(node.post(body)) == content(nodes["all"].post(body))
        figures = node.metrics()
        assert figures["peer_prefill_done"] == 1
        assert figures["values_adopted"] > 0
        assert worker.metric("offers") > 0
    finally:
        node.stop()
        worker.stop()


@pytest.mark.slow
def test_two_hundred_requests_leave_nothing_behind(nodes: Nodes, home: Path) -> None:
    def ask(number: int) -> None:
        name = ("decode", "prefill-decode")[number % 2]
        seeds = [SEED + number // 4 % 20] if number % 3 else []
        answer = nodes[name].post(question(*seeds, text=f"What is it? {number} " * 8, max_tokens=2))
        assert answer.status_code == 200

    SEED = 1_000_000
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(40)))
        time.sleep(0.5)
        files = {role: node.files for role, node in nodes.items()}
        list(pool.map(ask, range(200)))
    for role, node in nodes.items():
        until(lambda node=node: node.metric("requests_running") == 0)  # type: ignore[misc]
        figures = node.metrics()
        assert figures["kv_blocks_used"] == 0, role
        assert figures["integrity_errors"] == 0
        until(lambda role=role, node=node: node.files <= files[role] + 8, 10)  # type: ignore[misc]
    for name in ("encode", "prefill"):
        assert nodes[name].metric("offers_refused") == 0
    sockets = list((home / "shm").glob("*.sock"))
    assert len(sockets) <= len(nodes) + 1


@pytest.mark.slow
def test_a_peer_ends_quickly_while_it_is_asked(nodes: Nodes) -> None:
    """And the engine that asked ends quickly while its peer is stopped."""
    body = question(*fresh())
    with nodes["prefill"].stopped(), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(nodes["decode"].post, body)
        time.sleep(0.3)
        started = time.monotonic()
        nodes["decode"].stop()
        took = time.monotonic() - started
        with pytest.raises((httpx.TransportError, AssertionError)):
            assert waiting.result().status_code == 200
    nodes["decode"].start()
    assert took < 3 * TIMEOUT_S + 4
