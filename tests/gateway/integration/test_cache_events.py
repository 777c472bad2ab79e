"""The gateway follows what real engines announce of their caches, and sends images where they are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.integration.test_chain import PATIENCE_S, wait_until_ready
from tests.gateway.test_routing_hits import picture
from tests.support.servers import folder, forked, free_port

KINDS = ("encoder_events", "encoder_events_replay", "kv_events", "kv_events_replay")


class Engine:
    """A simulated engine with the addresses of its announcements. It can be ended and started again."""

    def __init__(self, name: str, home: Path) -> None:
        self.name, self._home, self.port = name, home, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.events = {kind: f"tcp://*:{free_port()}" for kind in KINDS}
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        words = ["serve", "--simulate", "--port", str(self.port)]
        for kind, address in self.events.items():
            words += [f"--{kind.replace('_', '-')}", address.replace("*", "127.0.0.1")]
        self._stack.enter_context(forked(words, self.port, self._home / f"{self.name}.log"))
        wait_until_ready(self.url)

    def stop(self) -> None:
        self._stack.close()

    @property
    def table(self) -> str:
        lines = [f'{kind} = "{address}"' for kind, address in self.events.items()]
        return "\n".join(["[[backend]]", f'name = "{self.name}"', f'url = "{self.url}"', *lines])


@contextlib.contextmanager
def gateway(engines: list[Engine], home: Path) -> Iterator[httpx.Client]:
    port, file = free_port(), home / "gateway.toml"
    settings = "slow_start_s = 0\nprobe_every_s = 0.2\n"
    file.write_text(settings + "\n".join(engine.table for engine in engines))
    words = ["gateway", "--config", str(file), "--port", str(port)]
    with (
        forked(words, port, home / "gateway.log"),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False) as client,
    ):
        yield client


def ask(client: httpx.Client, number: int) -> tuple[str, str]:
    """Ask about a picture. Returns the backend and the reason for it."""
    content = [
        {"type": "image_url", "image_url": {"url": picture(number)}},
        {"type": "text", "text": "What?"},
    ]
    body = {"model": "fovea-simulated", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-fovea-backend"], answer.headers["x-fovea-route"]


def held(client: httpx.Client) -> dict[str, float]:
    """The number of images that each backend holds, as the gateway knows it."""
    return {
        sample.labels["backend"]: sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.name == "fovea_gateway_backend_images_held"
    }


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_images_go_where_they_are_and_an_engine_that_was_restarted_has_none() -> None:
    """The story: the hash alone sent every image back to an engine that had just lost all of them."""
    with folder("events") as home:
        engines = [Engine("one", home), Engine("two", home)]
        try:
            for engine in engines:
                engine.start()
            with gateway(engines, home) as client:
                wait_for(lambda: held(client).keys() == {"one", "two"})
                first = {number: ask(client, number) for number in range(8)}
                homes = {number: backend for number, (backend, _) in first.items()}
                assert {reason for _, reason in first.values()} == {"image"}
                wait_for(lambda: sum(held(client).values()) == 8)
                lost = engines[0]
                away = [number for number, backend in homes.items() if backend == lost.name]
                assert away, "no picture of the eight belongs to the first engine"

                lost.stop()
                wait_for(lambda: lost.name not in held(client))
                assert {ask(client, number)[0] for number in away} == {"two"}
                lost.start()
                wait_for(lambda: held(client).get(lost.name) == 0)
                wait_for(lambda: held(client)["two"] == 8)
                again = {number: ask(client, number) for number in range(8)}
                assert {backend for backend, _ in again.values()} == {"two"}
                assert {again[number][1] for number in away} == {"image, held"}
                assert held(client)[lost.name] == 0, "it was sent nothing that the other one has"

                # What nobody holds any more goes where its hash says.
                cleared = httpx.delete(f"{engines[1].url}/admin/caches/all", trust_env=False)
                assert cleared.status_code == 200, cleared.text
                wait_for(lambda: held(client)["two"] == 0)
                assert {number: ask(client, number)[0] for number in range(8)} == homes
        finally:
            for engine in engines:
                engine.stop()
