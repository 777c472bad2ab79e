"""The end of a server: by signals, and because its engine has died."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from fovea.server.app import create_app
from fovea.server.run import EngineWatch, serving
from tests.http.hanging import Hanging
from tests.http.support import LAST, Wire, get, hosting, post, soon
from tests.server.scripted import Script
from tests.server.support import PATIENCE, chat
from tests.support.forks import Fork

ROOT = str(Path(__file__).resolve().parents[3])
CHILD = """
import json, sys, threading
sys.path.insert(0, sys.argv[1])
from fovea.server.app import create_app
from fovea.server.run import serve
from fovea.server.settings import ServerSettings
from tests.http.hanging import Hanging
engine = Hanging()
app = create_app(engine, ServerSettings.of(**json.loads(sys.argv[3])))
if sys.argv[4] == "dies":
    engine.dies_after_s = 0.3
sys.exit(serve(app, "127.0.0.1", int(sys.argv[2]), on_start=lambda: print("up", flush=True)))
"""


@contextlib.contextmanager
def process(
    mode: str = "lives", *, whole_end: bool = False, **settings: Any
) -> Iterator[tuple[Fork, tuple[str, int]]]:
    """A server in a process of its own."""
    with contextlib.closing(Wire.free_port()) as free:
        port = free.getsockname()[1]
    arguments = [ROOT, str(port), json.dumps({"lame_duck_s": 0, **settings}), mode]
    child = Fork(CHILD, arguments, os.environ | {"PYTHONPATH": ROOT}, whole_end=whole_end)
    try:
        assert child.stdout.readline() == "up\n"
        yield child, ("127.0.0.1", port)
    finally:
        child.kill()
        child.communicate()


def stream_of(address: tuple[str, int]) -> Wire:
    """A connection on which a stream has begun."""
    wire = Wire(address)
    wire.send(post(chat(stream=True)))
    assert wire.answer(head_only=True).status == 200
    return wire


def status_of(address: tuple[str, int], request: bytes) -> int:
    try:
        wire = Wire(address)
    except ConnectionError:
        return 0
    with contextlib.closing(wire):
        wire.send(request)
        return wire.answer().status


def test_port_stays_open_and_refuses_while_the_server_drains() -> None:
    """The docs promised 503, but the port was closed 0.2 s after SIGTERM, and clients got errors."""
    with process(lame_duck_s=600, drain_seconds=600) as (child, address):
        old = Wire(address)
        old.send(get("/ready"))
        assert old.answer().status == 200
        child.send_signal(signal.SIGTERM)
        soon(lambda: status_of(address, get("/ready")) == 503)
        old.send(get("/health"))
        answer = old.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        refused = Wire(address)
        refused.send(post(chat()))
        answer = refused.answer()
        assert (answer.status, answer.code) == (503, "unavailable")
        assert answer.headers["retry-after"]
        assert answer.headers["connection"] == "close"
        assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 0
        assert status_of(address, get()) == 0
        old.close()
        refused.close()


def test_interrupt_of_an_idle_server_ends_it_at_once() -> None:
    with process(lame_duck_s=600, drain_seconds=600) as (child, _):
        child.send_signal(signal.SIGINT)
        assert child.wait(PATIENCE) == 0


@pytest.mark.parametrize("signals", [1, 2], ids=["end of the drain", "second signal"])
def test_open_answers_end_with_an_error(signals: int) -> None:
    """At the end of the drain a stream was cut without a word, so it looked like a complete answer."""
    drain = 0.2 if signals == 1 else 600
    with process(drain_seconds=drain) as (child, address):
        wire, waiting = stream_of(address), Wire(address)
        waiting.send(post(chat(max_tokens=1)))
        for _ in range(signals):
            child.send_signal(signal.SIGTERM)
            soon(lambda: status_of(address, get("/ready")) != 200)
        events = [line for line in wire.read_all().decode().splitlines() if line.startswith("data: ")]
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert (error["code"], error["message"]) == ("unavailable", "the server is shutting down")
        answer = waiting.answer()
        assert (answer.status, answer.code) == (503, "unavailable")
        assert child.wait(PATIENCE) == 0
        wire.close()
        waiting.close()


def test_body_that_is_still_arriving_does_not_hold_the_process() -> None:
    with process(drain_seconds=0.1, body_timeout_s=600) as (child, address):
        wire = Wire(address)
        wire.send(post(chat())[:-1])
        soon(lambda: status_of(address, get()) == 200)
        child.send_signal(signal.SIGTERM)
        assert wire.answer().status == 503
        wire.close()
        assert child.wait(PATIENCE) == 0


def test_third_signal_kills() -> None:
    with process(drain_seconds=600, lame_duck_s=600) as (child, address):
        wire = stream_of(address)
        for _ in range(3):
            child.send_signal(signal.SIGTERM)
            soon(lambda: child.poll() is not None or status_of(address, get("/ready")) != 200)
        assert child.wait(PATIENCE) in (0, -signal.SIGTERM)  # 0 if the second one was quicker
        wire.close()


def test_process_ends_when_its_engine_has_died() -> None:
    """The engine ended itself after ten failed steps, and the process stayed up and answered 503 forever."""
    with process("dies", whole_end=True) as (child, address):
        wire = stream_of(address)
        events = wire.read_all().decode()
        assert "the device is lost" in events
        assert "[DONE]" not in events
        assert child.wait(PATIENCE) == 70
        wire.close()


def test_engine_that_dies_ends_only_its_server_within_a_program() -> None:
    engine = Hanging()
    with serving(create_app(engine), uvloop.new_event_loop) as url:
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        engine.status = "stopped"
        soon(lambda: status_of(("127.0.0.1", int(url.rpartition(":")[2])), get()) == 0)


def test_engine_that_was_never_ready_has_not_died() -> None:
    script = Script(LAST, status="stopped")
    watch = EngineWatch(script)
    assert not watch.has_died()
    script.status = "ready"
    assert not watch.has_died()
    script.status = "stopped"
    assert watch.has_died()


def test_end_of_a_block_cuts_open_answers() -> None:
    engine = Hanging()
    with hosting(engine) as host:
        wire = host.connect(post(chat(stream=True)))
        assert wire.answer(head_only=True).status == 200
        host.wires.remove(wire)
    assert b"the server is shutting down" in wire.read_all()
    wire.close()
    assert engine.closed_streams == 1


def test_status_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from fovea.cli.main import main

    monkeypatch.setattr("fovea.server.run.serve", lambda *_, **__: 70)
    assert main(["serve", "--simulate", "--port", "0"]) == 70
