"""A minimal OpenAI-style chat server for a library that has none: one thread per request, streamed answers.

A backend answers with an iterator of texts, one per token. The server supports only the requests of the
comparison.
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
    """A library that generates text."""

    def answer(self, prompt: str, images: list[Image.Image], tokens: int) -> Generator[str]:
        """Generate exactly `tokens` greedy tokens and yield the text of each.

        prompt: text to which the chat template was applied.
        """


def parser() -> argparse.ArgumentParser:
    """An argument parser with model, --port and --threads."""
    flags = argparse.ArgumentParser()
    flags.add_argument("model", type=Path)
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--threads", type=int, required=True)
    return flags


def serve(backend: Backend, model: Path, port: int) -> None:
    """Serve requests for ever. model: folder with the chat template."""
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
            with closing(texts), suppress(ConnectionError):  # if the client disconnects, the request ends
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
            data = "[DONE]" if content is None else json.dumps({"object": "chat.completion.chunk", **content})
            raw = f"data: {data}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(raw), raw))
            self.wfile.flush()

        def log_message(self, *_: object) -> None:
            """Do not log requests."""

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def _end(error: threading.ExceptHookArgs) -> None:
    """End the process when a thread of the backend fails, so that the run notices and reports it."""
    threading.__excepthook__(error)
    os._exit(1)


def _without_images(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """Replace the image parts of messages by those that a chat template expects. Returns the images, too."""
    images: list[Image.Image] = []

    def part(content: dict[str, Any]) -> dict[str, Any]:
        if content["type"] != "image_url":
            return content
        data = content["image_url"]["url"].split(",", 1)[1]
        images.append(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
        return {"type": "image"}

    def convert(message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        return message if isinstance(content, str) else {**message, "content": [part(p) for p in content]}

    return [convert(message) for message in messages], images
