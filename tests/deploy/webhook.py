"""A web server on loopback that collects the alerts which Alertmanager sends."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

PATIENCE_S = 60.0


class Webhook:
    """The web server and the alerts that it has got, the oldest first. url: where it listens."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.end_headers()
                webhook.take(json.loads(body)["alerts"])

            def log_message(self, format: str, *args: Any) -> None:
                """Write nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self.url = f"http://127.0.0.1:{self._server.server_port}/alerts"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self, alerts: list[dict[str, Any]]) -> None:
        """Note alerts."""
        with self._changed:
            self.alerts += alerts
            self._changed.notify_all()

    def wait_for(self, name: str, status: str) -> dict[str, Any]:
        """Wait for an alert. status: firing or resolved."""

        def find() -> dict[str, Any] | None:
            found = (
                one for one in self.alerts if one["labels"]["alertname"] == name and one["status"] == status
            )
            return next(found, None)

        with self._changed:
            assert self._changed.wait_for(lambda: find() is not None, PATIENCE_S), f"{name} is not {status}"
            alert = find()
        assert alert is not None
        return alert
