"""A healthy world for checks: a machine, a server and a launcher. A test gives them its fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fovea.cli.doctor_subject import monitoring_facts
from fovea.core.settings import flat_values
from fovea.doctor.check import Check, Status, Verdict, examine
from fovea.doctor.checks import CHECKS
from fovea.doctor.load import DoctorSettings, LoadFigures, LoadTest
from fovea.doctor.machine import Disk
from fovea.doctor.server import Answer, NoAnswer, Server
from fovea.doctor.subject import BuiltFacts, CheckpointFacts, KernelFacts, Subject, Workload
from fovea.engine.config import EngineConfig
from fovea.server.settings import ServerSettings

GIB = 1 << 30
URL = "http://127.0.0.1:8000"
METRICS = {
    "fovea:ready": 1, "fovea:requests_waiting": 0, "fovea:kv_usage": 0, "fovea:connections_open": 1,
    "fovea:kv_blocks_total": 32768, "fovea:kv_block_tokens": 16, "fovea:kv_block_bytes": 40960,
    "fovea:embed_cache_entries": 2, "fovea:embed_cache_bytes": 200_000,
    "fovea:embed_cache_capacity_bytes": 256 << 20, "fovea:embed_disk_capacity_bytes": 1 << 32,
    "fovea:embed_disk_off": 0, "fovea:embed_disk_corrupt_total": 0, "fovea:embed_disk_dropped_total": 0,
    "fovea:encoder_engines": 2, "fovea:failed_steps_total": 0, "fovea:integrity_errors_total": 0,
    'fovea:stage_seconds_sum{stage="decode"}': 8, 'fovea:stage_seconds_sum{stage="encode"}': 2,
}  # fmt: skip
CARD = {
    "id": "eyes", "owned_by": "fovea", "max_model_len": 8192, "dtype": "bfloat16", "quantization": "none",
}  # fmt: skip
FILES = {
    "/proc/loadavg": "0.1 0.2 0.3 1/100 12345",
    "/proc/meminfo": "MemTotal: 33554432 kB\nSwapTotal: 1048576 kB\nSwapFree: 1048576 kB\n",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "/limit/memory.max": str(8 * GIB),
    "/limit/memory.events": "low 0\noom 0\noom_kill 0\n",
    "/limit/cpu.stat": "usage_usec 1\nnr_periods 1000\nnr_throttled 1\n",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
}


@dataclass
class FakeMachine:
    """A machine of values."""

    files: Mapping[str, str] = field(default_factory=lambda: FILES)
    modes: Mapping[str, int] = field(default_factory=dict)
    free: int = 16 * GIB
    core_count: int = 4
    files_limit: int = 65536
    disk_value: Disk | OSError = Disk(50 * GIB, "ext4", True)
    programs: Mapping[str, str] = field(default_factory=dict)
    own_addresses: Sequence[str] = ()
    reachable: bool = False

    def text(self, path: str) -> str | None:
        return self.files.get(path)

    def mode(self, path: str) -> int | None:
        return self.modes.get(path)

    def disk(self, folder: str) -> Disk:
        if isinstance(self.disk_value, OSError):
            raise self.disk_value
        return self.disk_value

    def output(self, command: Sequence[str]) -> str | None:
        return self.programs.get(command[0])

    def cores(self) -> int:
        return self.core_count

    def free_memory(self) -> int:
        return self.free

    def open_files(self) -> int:
        return self.files_limit

    def cgroup(self, controller: str) -> list[str]:
        return ["/limit"]

    def addresses(self) -> list[str]:
        return list(self.own_addresses)

    def connects(self, address: str, port: int) -> bool:
        return self.reachable


def files(**changes: str | None) -> dict[str, str]:
    """FILES with other texts, by the ends of their paths; None: the file does not exist."""
    changed = dict(FILES)
    for end, text in changes.items():
        path = next(name for name in FILES if name.endswith(end.replace("__", ".")))
        changed.pop(path)
        if text is not None:
            changed[path] = text
    return changed


@dataclass
class FakeWeb:
    """A healthy server of Fovea, with keys, as a function of the request.

    routes: other answers by path: an answer, or a function of the request's JSON body that returns or raises
        one. None in place of an answer: the healthy one.
    metrics, card: their values. open_paths: paths that need no key.
    """

    routes: Mapping[str, Answer | Callable[[Any], Answer | None]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=lambda: METRICS)
    card: Mapping[str, Any] = field(default_factory=lambda: CARD)
    open_paths: Sequence[str] = ("/health", "/ready")
    headers: Mapping[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        timeout: float = 60.0,
        on_data: Callable[[], None] | None = None,
    ) -> Answer:
        """Answer a request."""
        parts = urlsplit(url)
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        route = self.routes.get(path)
        answer = route if isinstance(route, Answer) else route(body) if route is not None else None
        if answer is None:
            answer = self._healthy(path, dict(headers or {}), body)
        for _ in range(1 + answer.body.count(b"data:")):
            if on_data is not None:
                on_data()
        return answer

    def _healthy(self, path: str, headers: dict[str, str], body: Any) -> Answer:
        if path not in self.open_paths and headers.get("Authorization") != "Bearer secret":
            return error(401, "no key", self.headers)
        if path in ("/health", "/ready"):
            return Answer(200)
        if path == "/v1/models":
            return reply({"data": [dict(self.card)]})
        if path == "/metrics":
            return Answer(200, "".join(f"{name} {value}\n" for name, value in self.metrics.items()).encode())
        if path == "/admin/caches":
            return reply({"stages": {"encoder": {"hits": 5, "evictions": 2}}})
        if path == "/v1/chat/completions":
            return self._chat(body)
        return error(404, "no such path", {})

    def _chat(self, body: Any) -> Answer:
        content = body["messages"][0]["content"]
        urls = [] if isinstance(content, str) else [part["image_url"]["url"] for part in content[:-1]]
        if any(not url.startswith("data:") for url in urls):
            return error(403, "this URL is not allowed", {})
        if "timeout" in body:
            return error(408, "the request's timeout ran out", {})
        if len(str(content)) > 20_000 or len(urls) and len(urls[0]) > 5000:
            return error(400, "too large", {})
        if body.get("stream"):
            event = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
            return Answer(200, event * 5 + b'data: {"usage": {"completion_tokens": 5}}\n\ndata: [DONE]\n\n')
        text = '{"blue": true}' if "response_format" in body else "It is red."
        cached = 40 if set(urls) & self.seen else 0
        self.seen |= set(urls)
        details = {"cached_tokens": cached, "image_tokens": 49 if urls else 0}
        counts = {"prompt_tokens": 60, "completion_tokens": 4, "prompt_tokens_details": details}
        return reply({"choices": [{"message": {"content": text}}], "usage": counts})


def reply(value: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode())


def error(status: int, message: str, headers: Mapping[str, str]) -> Answer:
    return Answer(status, json.dumps({"error": {"message": message}}).encode(), headers)


def raising(reason: str) -> Callable[[Any], Answer]:
    """A route that ends the connection."""

    def route(body: Any) -> Answer:
        raise NoAnswer(reason)

    return route


class FakeLauncher:
    """A launcher whose processes are healthy servers, or those that a test gives, one after the other."""

    def __init__(self, folder: Path, *webs: FakeWeb, status: int | None = 0, log: str = "") -> None:
        self.cache_folder, self.ready_seconds, self._status = folder, 1.5, status
        self.text = log
        self._webs, self._next, self._running = webs or (FakeWeb(),), 0, False

    def plain(self) -> Server:
        return self.disturbed()

    def disturbed(self) -> Server:
        if not self._running:
            self._running, self._next = True, self._next + 1
        return Server(URL, self._webs[min(self._next, len(self._webs)) - 1], api_key="secret")

    def log(self) -> str:
        return self.text

    def kill(self) -> None:
        self._running = False

    def terminate(self) -> None:
        self._running = False

    def wait(self) -> int | None:
        return self._status


def figures(**changes: Any) -> LoadFigures:
    """Figures of a level of load without errors."""
    good = LoadFigures(20, 0, 0, {}, 2.0, 10.0, (50.0, 60.0, 70.0), (100.0, 150.0, 160.0))
    return replace(good, **changes)


def fake_load(
    closed: Callable[[int], LoadFigures] | None = None,
    arriving: Callable[[float], LoadFigures] | None = None,
) -> LoadTest:
    """A load test of a server that answers 20 requests per second at most, from four clients on."""

    def healthy_closed(clients: int) -> LoadFigures:
        return figures(per_second=min(20.0, 5.0 * clients))

    def healthy_open(rate: float) -> LoadFigures:
        return figures(per_second=rate)

    one, two = closed or healthy_closed, arriving or healthy_open
    return LoadTest(
        lambda server, clients, requests: one(clients),
        lambda server, rate, requests: two(rate),
        DoctorSettings(),
    )


def settings(**changes: Any) -> dict[str, Any]:
    """The settings of a server that is ready for production."""
    values = {**flat_values(EngineConfig()), **flat_values(ServerSettings())}
    keys = {"api_keys": ("k" * 32,), "admin_keys": ("a" * 32,), "metrics_keys": (), "host": "127.0.0.1"}
    assert set(changes) <= set(values) | set(keys), changes
    return {**values, **keys, **changes}


KERNELS = KernelFacts("AVX-512", "", "", 0)
CHECKPOINT = CheckpointFacts(
    "eyes", True, (), (), (), {"architecture": "Qwen3-VL", "tensors": 138, "parameters": 10**9}
)
BUILT = BuiltFacts("/model/fovea-engines", True, 2, ())


def subject(web: FakeWeb | None = None, **changes: Any) -> Subject:
    """A subject without a fault: an own server in place of a live one, unless a test says otherwise."""
    web = web or FakeWeb()
    values: dict[str, Any] = {
        "name": "eyes",
        "machine": FakeMachine(),
        "web": web,
        "kernels": lambda: KERNELS,
        "load": fake_load(),
        "workload": Workload(256, 56, 64),
        "monitoring": monitoring_facts(),
        "settings": settings(),
        "checkpoint": lambda: CHECKPOINT,
        "built": lambda: BUILT,
        "launcher": FakeLauncher(Path("/nowhere"), web),
        "sleep": lambda seconds: None,
    }
    return Subject(**{**values, **changes})


def live(web: FakeWeb | None = None, url: str = URL, **changes: Any) -> Subject:
    """A subject that is a live server."""
    web = web or FakeWeb()
    parts = {"launcher": None, "checkpoint": None, "built": None, "settings": None}
    return subject(web, live=Server(url, web, api_key="secret"), **{**parts, **changes})


def verdict(path: str, subject: Subject) -> Verdict:
    """The verdict of one check, by its path, as a run gives it."""
    return examine([named(path)], subject)[0].verdict


def named(path: str) -> Check:
    return next(check for check in CHECKS if check.path == path)


def assert_verdict(path: str, subject: Subject, status: Status, words: str = "") -> None:
    """Assert the status of a check, and that its text has some words. A fault always has a fix."""
    found = verdict(path, subject)
    text = " | ".join((found.figure, found.reason, found.fix))
    assert found.status is status, text
    assert words in text, text
    assert bool(found.fix) is (status in (Status.WARN, Status.FAIL)), text
