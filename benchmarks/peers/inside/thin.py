"""The smallest OpenAI-style chat server around a library that has none: one thread per request, answers are streams.

A backend answers with an iterator of texts, one per token. Only what the comparison sends is understood.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import threading
from collections.abc import Generator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

from PIL import Image


class Backend(Protocol):
    def answer(self, prompt: str, images: list[Image.Image], tokens: int) -> Generator[str]:
        """The texts of exactly `tokens` greedy tokens behind a prompt to which the chat template was applied."""


def parser() -> argparse.ArgumentParser:
    """model, --port and --threads."""
    flags = argparse.ArgumentParser()
    flags.add_argument("model", type=Path)
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--threads", type=int, required=True)
    return flags


def serve(backend: Backend, model: Path, port: int) -> None:
    import jinja2

    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        (model / "chat_template.jinja").read_text()
    )
    threading.excepthook = _end

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            raw = json.dumps({"object": "list", "data": [{"id": model.name, "object": "model"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            messages, images = _without_images(body["messages"])
            prompt = template.render(messages=messages, add_generation_prompt=True)
            texts = backend.answer(prompt, images, body.get("max_completion_tokens") or body["max_tokens"])
            with closing(texts), suppress(ConnectionError):  # a client may leave; its request ends with it
                self._stream(texts)

        def _stream(self, texts: Generator[str]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            count = 0
            for text in texts:
                count += 1
                self._event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            self._event({"choices": [], "usage": {"completion_tokens": count}})
            self._event(None)
            self.wfile.write(b"0\r\n\r\n")

        def _event(self, content: dict[str, Any] | None) -> None:
            said = "[DONE]" if content is None else json.dumps({"object": "chat.completion.chunk", **content})
            raw = f"data: {said}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(raw), raw))
            self.wfile.flush()

        def log_message(self, *_: object) -> None:
            """Requests are not logged."""

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def _end(error: threading.ExceptHookArgs) -> None:
    """A backend whose thread has died answers nobody: the process ends, which the run sees and reports."""
    threading.__excepthook__(error)
    os._exit(1)


def _without_images(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """Messages whose image parts are what a chat template expects, and the images in their order."""
    images: list[Image.Image] = []

    def part(said: dict[str, Any]) -> dict[str, Any]:
        if said["type"] != "image_url":
            return said
        data = said["image_url"]["url"].split(",", 1)[1]
        images.append(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
        return {"type": "image"}

    def message(said: dict[str, Any]) -> dict[str, Any]:
        content = said["content"]
        return said if isinstance(content, str) else {**said, "content": [part(p) for p in content]}

    return [message(said) for said in messages], images
