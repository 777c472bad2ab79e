"""A small OpenAI-compatible server on a loopback port that can behave like an old, odd or broken one."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fovea.bench.client import Client
from fovea.bench.context import WorkloadContext
from fovea.bench.measure import Sample
from fovea.bench.settings import Shape, Target

Json = dict[str, Any]
SMALL = Shape(
    visual_tokens=(4,), token_side=8, prompt_tokens=12, output_tokens=4, concurrency=3, repeats=1, warmup=0
)


@dataclass
class Scripted:
    """The behaviour of the server, and a record of the requests that it received.

    models: the models that it lists; None: it has no such route.
    key: the API key that it requires to list models; None: none.
    refuses: fields that it answers with status 400. The message names the field unless `silent`.
    streams: whether it answers with a stream.
    usage: whether it sends usage if the request asks for it.
    tokens_per_event: number of tokens that its usage counts for each piece of text.
    events: raw events to send instead of an answer.
    statuses: status codes of the next chat requests; 200 after the last one.
    takes_images: whether it has the route /v1/images.
    bodies, images: bodies of the chat requests and of the images that it received.
    url: its address while it runs.
    """

    models: Sequence[str] | None = ("scripted",)
    key: str | None = None
    refuses: frozenset[str] = frozenset()
    silent: bool = False
    streams: bool = True
    usage: bool = True
    tokens_per_event: int = 1
    events: Sequence[str] | None = None
    statuses: list[int] = field(default_factory=list)
    takes_images: bool = True
    bodies: list[Json] = field(default_factory=list)
    images: list[Json] = field(default_factory=list)
    url: str = ""

    @property
    def questions(self) -> list[Json]:
        """The chat requests after the first short question with which the client probes a server."""
        return [body for body in self.bodies if body["messages"][0]["content"] != "Say something."]

    def answer(self, body: Json) -> Iterator[str]:
        if self.events is not None:
            yield from self.events
            return
        length = body.get("max_tokens") or body["max_completion_tokens"]
        yield json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for number in range(length // self.tokens_per_event):
            yield json.dumps({"choices": [{"index": 0, "delta": {"content": f" {number}"}}]})
        yield json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if self.usage and body.get("stream_options"):
            details = {"cached_tokens": 1, "image_tokens": 4}
            usage = {"prompt_tokens": 9, "completion_tokens": length, "prompt_tokens_details": details}
            yield json.dumps({"choices": [], "usage": usage})
        yield "[DONE]"


class _Host(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Scripted) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def script(self) -> Scripted:
        assert isinstance(self.server, _Host)
        return self.server.script

    def do_GET(self) -> None:
        if self.script.key and self.headers.get("Authorization") != f"Bearer {self.script.key}":
            self.reply(401, {"error": {"message": "wrong key"}})
        elif self.script.models is None or self.path != "/v1/models":
            self.reply(404, {"detail": "Not Found"})
        else:
            self.reply(200, {"data": [{"id": name} for name in self.script.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/images" and self.script.takes_images:
            self.script.images.append(body)
            self.reply(200, {"url": f"fovea-image://{len(self.script.images)}"})
        elif self.path != "/v1/chat/completions":
            self.reply(404, {"detail": "Not Found"})
        else:
            self.chat(body)

    def chat(self, body: Json) -> None:
        wrong = sorted(self.script.refuses & body.keys())
        status = self.script.statuses.pop(0) if self.script.statuses else 200
        if wrong:
            self.reply(
                400, {"error": {"message": "no" if self.script.silent else f"unknown field {wrong[0]}"}}
            )
        elif status != 200:
            self.reply(status, {"error": {"message": "not now"}})
        elif not self.script.streams:
            self.reply(200, {"choices": []})
        else:
            self.script.bodies.append(body)
            self.stream(body)

    def stream(self, body: Json) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(OSError):  # the client may have closed the connection
            for payload in self.script.answer(body):
                self.wfile.write(f"data: {payload}\n\n".encode())
        self.close_connection = True

    def reply(self, status: int, body: Json) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def scripted(script: Scripted) -> Iterator[Scripted]:
    host = _Host(script)
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    script.url = f"http://127.0.0.1:{host.server_address[1]}"
    try:
        yield script
    finally:
        host.shutdown()
        host.server_close()
        thread.join()


@contextlib.asynccontextmanager
async def connected(script: Scripted, **target: Any) -> AsyncIterator[Client]:
    with scripted(script):
        async with Client(Target(script.url, **target)) as client:
            await client.connect()
            yield client


@contextlib.asynccontextmanager
async def workload_context(
    script: Scripted, shape: Shape = SMALL, **target: Any
) -> AsyncIterator[WorkloadContext]:
    async with connected(script, **target) as client:
        yield WorkloadContext(client, shape, "nonce")


def sample(
    *events: float, due_at: float = 0.0, sent_at: float | None = None, tokens: int | None = None, **other: Any
) -> Sample:
    """A complete answer whose pieces of text arrived at `events`; it ended with the last one."""
    sent = due_at if sent_at is None else sent_at
    ended = events[-1] if events else sent
    return Sample(due_at, sent_at=sent, events=list(events), ended_at=ended, tokens=tokens, **other)
