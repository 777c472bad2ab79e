"""A server that sends the page and, as answers, exactly the bytes that a test gives it, in parts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fovea.http.page import HEADERS, INDEX, read_folder

Parts = Callable[[dict[str, Any]], Iterable[bytes]]


@dataclass
class Scripted:
    """The server's URL, and the answer to the next questions.

    parts: returns the parts of an answer for the body of a question. It may wait between them.
    bodies: the questions so far.
    left: set once a client has left before the end of its answer.
    """

    url: str = ""
    parts: Parts = lambda body: ()
    bodies: list[dict[str, Any]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)


@contextmanager
def scripted() -> Iterator[Scripted]:
    """Serve the page and scripted answers on a free port until the block ends."""
    script, files = Scripted(), read_folder()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path in ("/ready", "/v1/models"):
                body = json.dumps({"status": "ready", "data": [{"id": "scripted"}]}).encode()
                self._send(body, {"Content-Type": "application/json"})
                return
            file = files.get(INDEX if self.path == "/" else self.path.removeprefix("/ui/"))
            if file is None:
                self.send_error(404)
            else:
                self._send(file.body, {**HEADERS, "Content-Type": file.media_type})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.bodies.append(body)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                for part in script.parts(body):
                    self.wfile.write(part)
                    self.wfile.flush()
            except OSError:
                script.left.set()

        def _send(self, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    host = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    host.daemon_threads = True
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    script.url = f"http://127.0.0.1:{host.server_address[1]}"
    try:
        yield script
    finally:
        host.shutdown()
        host.server_close()
        thread.join()
