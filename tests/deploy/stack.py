"""A server, a gateway with tenants, and Redis, as real programs, and requests of every kind for them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from tests.support.servers import folder, free_port, redis_server, started

CHAT = "/v1/chat/completions"
SERVER_KEY, METRICS_KEY = "fv-server", "fv-metrics"
TENANTS = {"alice": "", "bob": "requests_per_minute = 1", "carol": "cost_per_day = 0.00006"}
MODEL = "fovea-tiny"
BURST = 16
PRICES = "[default]\ntext_input = 1.0\noutput = 4.0\n"
Json = dict[str, Any]


@dataclass(frozen=True)
class Stack:
    """The running programs.

    server, gateway: their addresses, as HOST:PORT.
    server_keys: keys file of the server.
    key_file: file with a key for /metrics.
    """

    server: str
    gateway: str
    server_keys: Path
    key_file: Path


@contextlib.contextmanager
def stack(*options: str) -> Iterator[Stack]:
    """Start all programs. options: further ones of `fovea serve`, for example --simulate."""
    with folder("stack") as home, redis_server() as redis:
        server, gateway, dead = free_port(), free_port(), free_port()
        running = Stack(
            f"127.0.0.1:{server}", f"127.0.0.1:{gateway}", home / "server.toml", home / "metrics.key"
        )
        running.key_file.write_text(METRICS_KEY)
        (home / "engine.key").write_text(SERVER_KEY)
        _private(running.server_keys, server_keys())
        tenants = (_key(name, f"fv-{name}", more) for name, more in TENANTS.items())
        _private(home / "gateway-keys.toml", "".join(tenants))
        (home / "prices.toml").write_text(PRICES)
        _private(home / "gateway.toml", _gateway(server, dead))
        engine = ["serve", *options, "--port", str(server), "--keys-file", str(running.server_keys),
                  "--max-queue", "2", "--max-running", "4", "--served-model-name", MODEL]  # fmt: skip
        front = ["gateway", "--config", str(home / "gateway.toml"), "--port", str(gateway), "--redis", redis,
                 "--keys-file", str(home / "gateway-keys.toml"), "--prices", str(home / "prices.toml"),
                 "--probe-every-s", "0", "--breaker-failures", "2", "--breaker-open-s", "600",
                 "--policy", "priority", "--admin-key", METRICS_KEY, "--lame-duck-s", "0",
                 "--drain-seconds", "0"]  # fmt: skip
        with (
            started(_fovea(*engine, "--drain-seconds", "0"), [server], home / "server.log"),
            started(_fovea(*front), [gateway], home / "gateway.log"),
        ):
            yield running


def server_keys() -> str:
    """Return the server's keys file: a client, and Prometheus."""
    return _key("client", SERVER_KEY) + _key("prometheus", METRICS_KEY, 'roles = ["metrics"]')


def load(running: Stack) -> None:
    """Send requests of every kind, good and bad ones, and wait for all answers."""
    asyncio.run(_load(running))


async def _load(running: Stack) -> None:
    engine = httpx.AsyncClient(
        base_url=f"http://{running.server}", headers={"authorization": f"Bearer {SERVER_KEY}"}, timeout=60
    )
    front = httpx.AsyncClient(base_url=f"http://{running.gateway}", timeout=60)
    async with engine, front:
        await _ready(engine)
        await _send(engine, "", _server_requests())
        await asyncio.gather(*(engine.post(CHAT, json=chat(f"burst {n}", 200)) for n in range(BURST)))
        await engine.post(CHAT, json=chat(), headers={"authorization": "Bearer wrong"})
        await _send(front, "alice", [chat("cached", temperature=0)] * 2)
        await _send(front, "alice", [chat(model="trial", user=f"user {n}") for n in range(6)])
        await _send(front, "alice", [chat(model=model) for model in ("both", "gone", "gone", "unknown")])
        together = [_post(front, "alice", chat(f"together {n}", 40, 32)) for n in range(6)]
        await asyncio.gather(*together)
        await _send(front, "alice", [chat("look", picture=32), chat("look", temperature=1)])
        await _send(front, "bob", [chat()] * 3)
        await _send(front, "carol", [chat()] * 3)


def _server_requests() -> list[Json]:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    return [
        chat(),
        chat(picture=64),
        chat(picture=64),
        chat(picture=96, stream=True),
        chat(response_format=form),
        chat(max_tokens=-1),
        chat("too late", 2000, timeout=0.001),
    ]


def chat(text: str = "Hello", max_tokens: int = 8, picture: int = 0, **fields: Any) -> Json:
    """Return the body of a chat request. picture: side of an image in pixels; 0: without an image."""
    content: list[Json] = [{"type": "text", "text": text}]
    if picture:
        file = io.BytesIO()
        Image.new("RGB", (picture, picture), (picture, 90, 30)).save(file, "png")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    message = {"role": "user", "content": content}
    return {"model": MODEL, "messages": [message], "max_tokens": max_tokens, **fields}


async def _send(client: httpx.AsyncClient, tenant: str, bodies: Sequence[Json]) -> None:
    for body in bodies:
        await _post(client, tenant, body)


async def _post(client: httpx.AsyncClient, tenant: str, body: Json) -> None:
    await client.post(CHAT, json=body, headers={"authorization": f"Bearer fv-{tenant}"} if tenant else {})


async def _ready(client: httpx.AsyncClient) -> None:
    """Wait until the model is loaded."""
    async with asyncio.timeout(60):
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.05)


def _fovea(*words: str) -> list[str]:
    return [sys.executable, "-m", "fovea.cli.main", *words]


def _key(name: str, key: str, more: str = "") -> str:
    return f'[[key]]\nname = "{name}"\nhash = "sha256:{hashlib.sha256(key.encode()).hexdigest()}"\n{more}\n'


def _private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def _gateway(server: int, dead: int) -> str:
    """Return the gateway's file: a backend that works, one that nobody listens for, and an experiment."""
    return f"""
[[backend]]
name = "works"
url = "http://127.0.0.1:{server}"
models = ["{MODEL}"]
api_key_file = "engine.key"
max_requests = 2
priority = 1
[[backend]]
name = "dead"
url = "http://127.0.0.1:{dead}"
models = ["{MODEL}", "gone"]
[[model]]
name = "{MODEL}"
backends = ["works"]
[[model]]
name = "both"
served = "{MODEL}"
backends = ["dead", "works"]
[[model]]
name = "gone"
backends = ["dead"]
[[model]]
name = "copy"
served = "{MODEL}"
backends = ["works"]
[[model]]
name = "trial"
[experiments]
folder = "experiments"
[[experiment]]
name = "e"
model = "trial"
sticky_by = "user"
variants = [
  {{ name = "old", model = "{MODEL}", weight = 50 }},
  {{ name = "new", model = "copy", weight = 50 }},
]
"""
