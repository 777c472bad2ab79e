"""Parts of a replica and of scaling that need no Ray: signals, policy, ports of peers, relay, child."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, web

from fovea.cluster.ray.engine import EngineProcess
from fovea.cluster.ray.peers import PeerPorts, assign
from fovea.cluster.ray.policy import ScalePolicy, latest_signals
from fovea.cluster.ray.relay import Relay
from fovea.cluster.ray.signals import Goodput, first_tokens, from_report, gauges, report, work_of
from fovea.cluster.ray.status import state_of
from fovea.cluster.scaling import Signals
from fovea.core.errors import EngineError

METRICS = """
# TYPE fovea:queued_work_seconds gauge
fovea:queued_work_seconds 3.5
fovea:queued_encode_seconds 1.5
fovea:oldest_waiting_image_seconds 2.0
fovea:requests_running 4.0
fovea:ttft_seconds_bucket{le="1.0"} 8.0
fovea:ttft_seconds_bucket{le="2.5"} 9.0
fovea:ttft_seconds_bucket{le="+Inf"} 10.0
vllm:num_requests_running{engine="0"} 4.0
"""


def test_signals_are_read_from_metrics() -> None:
    found = gauges(METRICS)
    assert found["queued_work_seconds"] == 3.5
    assert not [name for name in found if "bucket" in name]
    assert Signals.of_stats(found, work_of("encode")) == Signals(1.5, 2.0, 0)
    assert Signals.of_stats(found, work_of("decode")).queued_s == 2.0
    assert first_tokens(METRICS) == {1.0: 8.0, 2.5: 9.0, float("inf"): 10.0}


def test_goodput_counts_recent_answers_only() -> None:
    goodput = Goodput(1.0)
    assert goodput.share(0.0, {1.0: 8.0, 2.5: 9.0, float("inf"): 10.0}) is None
    assert goodput.share(10.0, {1.0: 9.0, 2.5: 12.0, float("inf"): 14.0}) == 0.25
    assert goodput.share(90.0, {1.0: 11.0, 2.5: 14.0, float("inf"): 16.0}) == 1.0  # the first ones are old
    assert Goodput(0.0).share(0.0, {1.0: 1.0}) is None


def test_a_report_is_read_back() -> None:
    """The story: the places of running requests were left out, so full engines counted as idle on Ray."""
    for signals in (Signals(1.5, 0.2, 3, 0.9, 64.0), Signals(0.0, 0.0, 0, None)):
        assert from_report(report(signals)) == signals


def context(target: int, now: float, *signals: Signals) -> Any:
    names = [f"replica{number}" for number in range(len(signals))]
    metrics: dict[str, dict[str, list[Any]]] = {}
    for name, one in zip(names, signals, strict=True):
        for key, value in report(one).items():
            old = SimpleNamespace(value=99.0)
            metrics.setdefault(key, {})[name] = [old, SimpleNamespace(value=value)]
    metrics["ongoing"] = {name: [SimpleNamespace(value=7.0)] for name in names}
    return SimpleNamespace(
        app_name="m", deployment_name="all", target_num_replicas=target, current_time=now,
        running_replicas=[*names, "starting"], raw_metrics=metrics,
    )  # fmt: skip


def test_the_policy_scales_by_the_latest_signals_and_says_why() -> None:
    published: dict[str, dict[str, Any]] = {}
    policy = ScalePolicy(
        lambda kind, name, value: published.update({name: value}),
        replicas_min=1, replicas_max=3, target_queue_s=1.0, scale_up_s=0.0, scale_down_s=5.0,
    )  # fmt: skip
    busy, idle = Signals(8.0, 1.0, 9), Signals()
    assert latest_signals(context(1, 0.0, busy)) == [busy]
    assert policy(context(1, 0.0, busy)) == (2, {})
    assert published["m/all/change"]["before"] == 1
    assert "8.00 s of work wait" in published["m/all/latest"]["reason"]
    assert policy(context(2, 1.0, busy, busy))[0] == 3
    quiet = (idle, idle, idle)
    assert policy(context(3, 10.0, *quiet))[0] == 3
    assert policy(context(3, 16.0, *quiet))[0] == 2
    assert policy(context(2, 22.0, idle, idle))[0] == 1
    assert policy(context(1, 40.0, idle))[0] == 1
    assert policy(context(1, 50.0))[0] == 1  # nobody answers yet


def test_a_decision_that_cannot_be_published_counts_all_the_same() -> None:
    def fail(*_: Any) -> None:
        raise ConnectionError("the head is away")

    policy = ScalePolicy(fail, replicas_min=1, replicas_max=2, target_queue_s=1.0)
    assert policy(context(1, 0.0, Signals(8.0, 1.0, 9)))[0] == 2


def test_engines_keep_their_ports() -> None:
    assert assign(["", "", ""], {"b": "B", "a": "A"}) == ["a", "b", ""]
    assert assign(["a", "b", ""], {"b": "B", "c": "C"}) == ["c", "b", ""]
    assert assign(["c"], {"c": "C", "d": "D"}) == ["c"]


async def test_a_port_leads_to_its_engine_and_closes_without_one() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"echo " + await reader.readline())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    ports = PeerPorts(2)
    first, second = (int(url.rpartition(":")[2]) for url in (await ports.start()).split(","))
    ports.update({"engine": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"})
    assert await ask(first) == b"echo hello\n"
    assert await ask(second) == b""
    ports.update({})
    assert await ask(first) == b""
    ports.close()
    server.close()


async def ask(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"hello\n")
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@dataclass
class Exchange:
    """One request to an ASGI application, and what it sent."""

    scope: dict[str, Any]
    pieces: list[bytes]
    sent: list[dict[str, Any]] = field(default_factory=list)

    async def receive(self) -> dict[str, Any]:
        piece = self.pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self.pieces)}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.sent)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = self.sent[0]["headers"]
        return found


def request(path: bytes, *pieces: bytes, root: str = "", **more: str) -> Exchange:
    size = sum(map(len, pieces))
    headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in more.items()]
    scope = {
        "type": "http", "method": "POST", "path": path.decode(), "raw_path": path, "root_path": root,
        "query_string": b"a=%20b",
        "headers": [(b"content-length", str(size).encode()), (b"host", b"outside"), *headers],
    }  # fmt: skip
    return Exchange(scope, [*pieces])


@pytest.fixture
async def engine() -> AsyncIterator[str]:
    async def answer(asked: web.Request) -> web.StreamResponse:
        body = await asked.read()
        if asked.query.get("cut"):
            response = web.StreamResponse(headers={"x-request-id": "r"})
            await response.prepare(asked)
            await response.write(b"half")
            assert asked.transport is not None
            asked.transport.abort()
            return response
        found = {
            "path": asked.raw_path, "size": len(body), "length": asked.headers.get("content-length"),
            "key": asked.headers.get("authorization"), "host": asked.host,
        }  # fmt: skip
        return web.json_response(found, status=418, headers={"x-other": "1", "Server": "engine"})

    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    await runner.cleanup()


async def test_the_relay_passes_a_request_on_as_it_is(engine: str) -> None:
    relay = Relay(engine, "r1")
    exchange = request(
        b"/sim/v1/x%2Fy", b"a" * 100_000, b"b" * 200_000, root="/sim", authorization="Bearer k"
    )
    await relay(exchange.scope, exchange.receive, exchange.send)
    found = json.loads(exchange.body)
    assert exchange.sent[0]["status"] == 418
    assert found["path"] == "/v1/x%2Fy?a=%20b"
    assert (found["size"], found["length"], found["key"]) == (300_000, "300000", "Bearer k")
    assert found["host"] != "outside"
    assert (b"x-fovea-replica", b"r1") in exchange.headers
    assert (b"x-other", b"1") in exchange.headers
    assert not {b"server", b"date", b"connection"} & {name for name, _ in exchange.headers}
    await relay.close()


async def test_an_answer_that_breaks_off_ends_with_an_error(engine: str) -> None:
    relay = Relay(engine, "r1")
    exchange = request(b"/v1", b"x")
    exchange.scope["query_string"] = b"cut=1"
    with pytest.raises(EngineError, match="was lost within an answer"):
        await relay(exchange.scope, exchange.receive, exchange.send)
    assert exchange.body == b"half"
    assert exchange.sent[-1]["more_body"] is True
    await relay.close()


async def test_an_engine_that_is_away_is_a_502() -> None:
    relay = Relay("http://127.0.0.1:9", "r1", refuse_after_s=0.0)
    exchange = request(b"/v1", b"x")
    await relay(exchange.scope, exchange.receive, exchange.send)
    assert exchange.sent[0]["status"] == 502
    assert json.loads(exchange.body)["error"]["code"] == "engine_unreachable"
    await relay.close()


async def is_ready(address: str) -> bool:
    try:
        async with ClientSession() as session, session.get(f"{address}/ready") as answer:
            return answer.status == 200
    except ClientError:
        return False


async def test_an_engine_starts_and_ends() -> None:
    engine = EngineProcess({"simulate": True, "served_model_name": "s", "lame_duck_s": 0.0})
    await engine.start()
    await engine.wait_until(is_ready)
    assert not engine.ended
    command = (await asyncio.to_thread(subprocess.run, ["ps", "-o", "args=", "-p", str(engine.pid)],
                                       capture_output=True, text=True)).stdout  # fmt: skip
    assert "served_model_name" not in command
    await engine.stop(5.0)
    assert "it ended with status 0" in engine.ended


async def test_an_engine_that_does_not_start_says_why() -> None:
    engine = EngineProcess({"simulate": True, "max_queu": 3})
    await engine.start()
    with pytest.raises(EngineError, match=r"the engine did not start: .*max_queu"):
        await engine.wait_until(is_ready)


ORPHAN = """
import asyncio
from fovea.cluster.ray.engine import EngineProcess
async def main():
    engine = EngineProcess({"simulate": True})
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_an_engine_dies_with_its_replica() -> None:
    dies_with_its_parent(ORPHAN, "the engine has outlived its replica by a minute")


GUARDED = """
import subprocess, sys, time
from fovea.cluster.ray.guard import start_guard
start_guard()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="environments of processes are read from Linux's /proc")
def test_a_guard_ends_what_a_killed_process_leaves() -> None:
    """HAProxy once outlived a killed `fovea cluster up`, and kept its port from the next one."""
    dies_with_its_parent(GUARDED, "a process has outlived its guard by a minute")


def dies_with_its_parent(script: str, failure: str) -> None:
    """Kill a script that has printed the pid of a child, and wait for the child's end."""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    for _ in range(600):
        if not is_alive(child):
            return
        asyncio.run(asyncio.sleep(0.1))
    os.kill(child, signal.SIGKILL)
    pytest.fail(failure)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_state_of_a_cluster() -> None:
    replica = {"replica_id": "r1", "state": "RUNNING", "node_ip": "10.0.0.5"}
    deployment = {
        "status": "HEALTHY", "message": "", "target_num_replicas": 2,
        "replicas": [replica, {"replica_id": "r2", "state": "STARTING", "node_ip": None}],
    }  # fmt: skip
    details = {
        "applications": {"m": {"status": "RUNNING", "route_prefix": "/", "deployments": {"all": deployment}}}
    }
    entries = {"m/all/r1": {"pid": 7, "signals": report(Signals(1.5, 0.5, 3, None))}}
    decisions = {
        "m/all/latest": {"reason": "enough"},
        "m/all/change": {"before": 1, "replicas": 2, "reason": "work waits"},
    }
    state = state_of(details, entries, decisions, ["10.0.0.5", "10.0.0.6"])
    (role,) = state.models[0].roles
    assert (role.reason, role.change) == ("enough", "1 -> 2: work waits")
    assert (role.replicas[0].pid, role.replicas[0].queued_s, role.replicas[0].good) == (7, 1.5, None)
    assert (role.replicas[1].queued_s, role.replicas[1].node) == (None, "")
    assert (state.nodes["10.0.0.5"], state.nodes["10.0.0.6"]) == (1, 0)
    assert json.loads(json.dumps(state.as_json()))["models"][0]["roles"][0]["target"] == 2
