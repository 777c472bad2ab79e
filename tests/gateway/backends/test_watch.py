"""Health checks: what a backend answers decides about its health, its draining and its models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fovea.gateway.backends.backend import Backend
from fovea.gateway.backends.watch import LEAST_SAMPLES, Watch
from fovea.gateway.config import BackendConfig
from fovea.gateway.settings import ResilienceSettings
from tests.gateway.samples import fleet, run

Reply = tuple[int, bytes] | Exception
LISTED = (200, json.dumps({"data": [{"id": "x"}, {"id": "y"}]}).encode())


class Net:
    """A watch over backends whose answers are given by URL.

    changes, ejected: what the watch has told.
    """

    def __init__(self, *configs: BackendConfig, **replies: Reply) -> None:
        self.replies: dict[str, Reply] = {}
        self.urls: list[str] = []
        self.changes = 0
        self.ejected: list[str] = []
        self.now = 0.0
        settings = ResilienceSettings()
        self.fleet = fleet(configs, settings)
        self.watch = Watch(self.fleet, self._get, settings, lambda: self.now, self._changed, self._eject)

    async def _get(self, url: str, key: str, timeout_s: float) -> tuple[int, bytes]:
        self.urls.append(url)
        reply = self.replies.get(url, (404, b""))
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _changed(self) -> None:
        self.changes += 1

    def _eject(self, backend: Backend) -> None:
        self.ejected.append(backend.name)

    def backend(self, name: str = "a") -> Backend:
        found = self.fleet.get(name)
        assert found is not None
        return found

    def check(self, times: int = 1) -> Backend:
        for _ in range(times):
            run(self.watch.check(self.backend()))
        return self.backend()


def net(**options: Any) -> Net:
    return Net(BackendConfig("http://a:1", "a", **{"models": ("m",), **options}))


@pytest.mark.parametrize(
    ("reply", "healthy"),
    [
        ((200, b""), True), ((204, b""), True), ((302, b""), True), ((404, b""), True), ((401, b""), True),
        ((500, b""), False), ((503, b""), False), ((429, b""), False),
        (OSError("refused"), False), (TimeoutError(), False),
    ],
)  # fmt: skip
def test_answers_of_a_health_check(reply: Reply, healthy: bool) -> None:
    made = net(health="/alive")
    made.replies["http://a:1/alive"] = (200, b"")
    assert made.check().healthy
    made.replies["http://a:1/alive"] = reply
    assert made.check(times=2).healthy is healthy
    assert made.changes == (not healthy)
    assert set(made.urls) == {"http://a:1/alive"}


@pytest.mark.parametrize("body", [b'{"status":"shutting down"}', b"draining"])
def test_a_backend_that_shuts_down(body: bytes) -> None:
    made = net(health="/health")
    made.replies["http://a:1/health"] = (200, b"")
    made.check()
    made.replies["http://a:1/health"] = (503, body)
    one = made.check(times=5)
    assert (one.healthy, one.why_not(0.0, vision=False)) == (True, "draining")


def test_without_a_path_ready_is_asked_and_then_health() -> None:
    made = net()
    made.replies["http://a:1/health"] = (200, b"")
    made.check(times=2)
    assert made.urls == ["http://a:1/ready", "http://a:1/health", "http://a:1/health"]
    ready = net()
    ready.replies["http://a:1/ready"] = (200, b"")
    ready.check(times=2)
    assert ready.urls == ["http://a:1/ready"] * 2


def test_models_are_learned() -> None:
    made = net(models=())
    made.replies = {"http://a:1/ready": (200, b""), "http://a:1/v1/models": LISTED}
    assert made.check().models == {"x", "y"}
    assert made.changes == 1
    made.check(times=20)
    assert made.changes == 1
    assert 1 < made.urls.count("http://a:1/v1/models") < 5


@pytest.mark.parametrize(
    "reply",
    [
        (500, b""), (200, b""), (200, b"[]"), (200, b'{"data":5}'), (200, b'{"data":[5]}'),
        (200, b'{"data":[]}'), (200, b'{"data":[{}]}'), (200, b"\xff"), OSError("x"), TimeoutError(),
    ],
)  # fmt: skip
def test_a_list_of_models_that_cannot_be_read_changes_nothing(reply: Reply) -> None:
    made = net(models=())
    made.replies = {"http://a:1/ready": (200, b""), "http://a:1/v1/models": LISTED}
    made.check()
    made.replies["http://a:1/v1/models"] = reply
    assert made.check(times=30).models == {"x", "y"}
    assert made.backend().healthy


def test_configured_models_are_not_asked_for() -> None:
    made = net()
    made.replies["http://a:1/ready"] = (200, b"")
    assert made.check(times=3).models == {"m"}
    assert all("models" not in url for url in made.urls)


async def test_slow_backends_are_ejected() -> None:
    made = Net(*(BackendConfig(f"http://{name}:1", name, ("m",)) for name in "abc"))
    for name, seconds in (("a", 0.1), ("b", 0.1), ("c", 5.0)):
        for _ in range(LEAST_SAMPLES):
            made.backend(name).note_first_byte(seconds)
    made.watch.tick()
    assert made.ejected == ["c"]
    made.watch.tick()
    assert made.ejected == ["c"]
