"""Tests of benchmarks/gateway: processor time, bodies, rows, memory, and one real run of all its parts."""

from __future__ import annotations

import base64
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gateway"
NAMES = ("simulated", "processor_time", "payloads", "connection", "load", "slow", "proxies", "proxies.base",
         "running", "cost_rows", "cost_page", "cost", "memory")  # fmt: skip


@pytest.fixture(scope="module")
def gateway() -> Iterator[SimpleNamespace]:
    """The benchmark's modules, imported for this file only: others have some of their names, too."""
    before = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    sys.path.insert(0, str(FOLDER))
    try:
        modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in NAMES}
        yield SimpleNamespace(**modules)
    finally:
        sys.path.remove(str(FOLDER))
        for name in [name for name in sys.modules if name in NAMES or name.startswith("proxies.")]:
            del sys.modules[name]
        sys.modules.update(before)


SPIN = """
import os, sys, time
children = [os.fork() for _ in range(1)]
while time.process_time() < 0.1:
    pass
print("ready", flush=True)
time.sleep(600)
"""


def test_processor_time_counts_the_whole_family(gateway: SimpleNamespace) -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
            usage = gateway.processor_time.usage(process.pid)
            family = gateway.processor_time.family(process.pid)
        finally:
            for pid in reversed(gateway.processor_time.family(process.pid)):
                os.kill(pid, signal.SIGKILL)
    assert usage.processes == usage.threads == len(family) == 2
    assert 0.2 <= usage.clock_s < 0.7
    assert abs(usage.clock_s - usage.stat_s) <= 4 * gateway.processor_time.TICK_S
    assert usage.resident_mib > 1


def test_processor_time_of_no_process(gateway: SimpleNamespace) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert gateway.processor_time.clock_of(process.pid) == 0
    with pytest.raises(ProcessLookupError):
        gateway.processor_time.usage(process.pid)


@pytest.mark.parametrize("name", ["text", "image", "photo", "burst"])
def test_bodies_have_their_size_and_differ(gateway: SimpleNamespace, name: str) -> None:
    kind = gateway.payloads.KINDS[name]
    bodies = gateway.payloads.bodies(kind, 4)
    assert len(set(bodies)) == 4
    assert bodies == gateway.payloads.bodies(kind, 4)
    for body in bodies:
        assert abs(len(body) - kind.size) <= kind.size / 50
        request = json.loads(body)
        assert (request.get("stream", False), request.get("max_tokens", 0)) == (kind.events > 0, kind.events)


def test_pictures_are_real(gateway: SimpleNamespace) -> None:
    forms = []
    for body in gateway.payloads.bodies(gateway.payloads.KINDS["image"], 2):
        url = json.loads(body)["messages"][0]["content"][1]["image_url"]["url"]
        head, _, data = url.partition(",")
        image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
        image.load()
        assert head == f"data:image/{image.format.lower()};base64"
        forms.append(image.format)
    assert forms == ["PNG", "JPEG"]


def a_slice(gateway: SimpleNamespace, proxy: str, turn: int, *, open_loop: bool, **values: Any) -> Any:
    shared = {"requests": 100, "errors": Counter(), "seconds": 1.0, "cpu_s": 0.0, "cpu_check_s": 0.0,
              "p50_ms": 1.0, "p99_ms": 2.0}  # fmt: skip
    return gateway.cost_rows.Slice(proxy, "text", open_loop, turn, **{**shared, **values})


def slices(gateway: SimpleNamespace) -> list[Any]:
    """Three rounds on a machine that is slow in the second."""
    result = []
    for turn, slow in enumerate((0.0, 50.0, 0.0)):
        result += [
            a_slice(gateway, "direct", turn, open_loop=True, p50_ms=1.0 + slow),
            a_slice(gateway, "mine", turn, open_loop=True, p50_ms=1.5 + slow, cpu_s=0.08, cpu_check_s=0.07),
            a_slice(gateway, "mine", turn, open_loop=False, cpu_s=0.95, requests=1900, errors=Counter(bad=1)),
        ]
    return result


def test_rows_compare_with_the_direct_way_of_the_same_round(gateway: SimpleNamespace) -> None:
    direct, mine = gateway.cost_rows.rows(slices(gateway))
    assert (direct.proxy, direct.added_ms) == ("direct", 0.0)
    assert mine.added_ms == pytest.approx(0.5)
    assert mine.cpu_ms == pytest.approx(0.5)
    assert mine.cpu_open_ms == pytest.approx(0.8)
    assert mine.per_core_s == pytest.approx(2000)
    assert (mine.per_s, mine.busy, mine.is_limit) == (1900, 0.95, True)
    assert mine.errors == {"bad": 3}
    assert gateway.cost_rows.clocks_differ_s(slices(gateway)) == pytest.approx(0.95)


def test_targets_are_met_or_missed(gateway: SimpleNamespace) -> None:
    mine = gateway.cost_rows.rows(slices(gateway))[1]
    most, added = (t for t in gateway.cost_rows.TARGETS if t.kind == "text")
    assert not most.met(mine)
    assert added.met(mine)
    rate = gateway.cost_rows.Target("text", "per_s", 2000.0, "", at_least=True)
    assert not rate.met(mine)


def test_the_table_tells_what_is_missing_and_what_failed(gateway: SimpleNamespace) -> None:
    footprint = gateway.cost_page.Footprint("Mine", "1.0", "none", 1, 2, 30.0, 31.0, 0.5)
    text = gateway.cost_page.tables(
        gateway.cost_rows.rows(slices(gateway)), {"mine": footprint}, {"other": "not installed"}
    )
    assert "| Mine | 0.800 | 0.500 (0.500 to 0.500) | 1,900 | 95% | 2,000 | 1.50 | 2.00 | +0.50 |" in text
    assert "0.80 (missed)" in text
    assert "Not measured: other (not installed)." in text
    assert "Failed requests: Mine, text: {'bad': 3}." in text


def phase(gateway: SimpleNamespace, turn: int, mib: list[float]) -> Any:
    steps = [float(step) for step in range(len(mib))]
    return gateway.memory.Phase("requests", turn, "1,000 requests", steps, mib, 0, {})


def test_memory_that_settles_is_flat(gateway: SimpleNamespace) -> None:
    settles = [40.0, 70.0, 90.0, 100.0, 100.5, 99.5, 100.5, 100.0]
    assert not gateway.memory.problems([phase(gateway, turn, settles) for turn in range(3)])


def test_memory_that_grows_is_not(gateway: SimpleNamespace) -> None:
    grows = [100.0 + 5 * step for step in range(10)]
    assert phase(gateway, 0, grows).slope == pytest.approx(5.0)
    assert gateway.memory.problems([phase(gateway, 0, grows)]) == ["requests, time 1: grows by 20.0 MiB"]


def test_memory_that_is_kept_every_time_is_not_flat(gateway: SimpleNamespace) -> None:
    levels = [phase(gateway, turn, [60.0 + 20 * turn] * 6) for turn in range(3)]
    assert gateway.memory.problems(levels) == [
        "requests: the maximum is 80.0 MiB the second time, and 100.0 MiB the last time"
    ]


def test_a_plugged_command_gets_port_and_backends(gateway: SimpleNamespace, tmp_path: Path) -> None:
    proxy = gateway.proxies.of_command("mine=run --port {port} {backends} --quiet")
    start = gateway.base.Start(8000, ["http://127.0.0.1:1", "http://127.0.0.1:2"], tmp_path)
    assert (proxy.name, " ".join(proxy.command(start))) == (
        "mine",
        "run --port 8000 --backend http://127.0.0.1:1 --backend http://127.0.0.1:2 --quiet",
    )
    with pytest.raises(gateway.proxies.SetupError, match="NAME=COMMAND"):
        gateway.proxies.of_command("run without a name")


def test_a_proxy_that_does_not_start_is_an_error_with_its_output(gateway: SimpleNamespace) -> None:
    proxy = gateway.proxies.of_command("mine=sh -c 'echo no such {port} >&2'")
    with (
        pytest.raises(gateway.proxies.SetupError, match="no such"),
        gateway.running.running(proxy, ["http://127.0.0.1:1"], []),
    ):
        pass


def test_a_comparison_measures_every_kind(gateway: SimpleNamespace) -> None:
    """Real backends, a real load generator and the bare proxy in one short round; no figure is asserted."""
    plan = gateway.cost.Plan([gateway.proxies.load("bare")], ["text", "image", "burst"], 1, 0.05, [], [])
    results = gateway.cost.compare(plan)
    assert not results["missing"]
    assert [(row.proxy, row.kind) for row in results["rows"]] == [
        (proxy, kind) for kind in plan.kinds for proxy in ("direct", "bare")
    ]
    for row in results["rows"]:
        assert not row.errors
        assert row.per_s > 0
        assert (row.cpu_ms > 0) == (row.proxy == "bare")


def test_errors_of_a_server_are_counted(gateway: SimpleNamespace, tmp_path: Path) -> None:
    with (
        gateway.running.backends(1, [], tmp_path) as urls,
        gateway.running.Generator([], tmp_path) as generator,
    ):
        for behaviour, reason in (
            ({"mode": "refuse"}, "status 503"),
            ({"mode": "kill"}, "connection closed"),
        ):
            gateway.running.ask(urls[0], "/behaviour", json.dumps(behaviour))
            result = generator.carry_out(gateway.load.Order(urls[0], "burst", requests=5, connections=2))
            assert (result["requests"], result["errors"]) == (0, {reason: 5})
        status, answer = gateway.running.ask(urls[0], "/behaviour", '{"mode": "explode"}')
        assert (status, b"explode" in answer) == (400, True)


def test_slow_clients_wait(gateway: SimpleNamespace, tmp_path: Path) -> None:
    with gateway.running.backends(1, [], tmp_path) as urls:
        with gateway.slow.readers(urls[0], 5) as readers:
            deadline = time.monotonic() + 10.0
            while readers.moved < 10:
                assert time.monotonic() < deadline
                readers.turn()
            assert (len(readers.sockets), readers.closed) == (5, 0)
        with gateway.slow.senders(urls[0], 5) as senders:
            senders.turn()
            assert senders.moved == 5 * gateway.slow.PIECE_BYTES
