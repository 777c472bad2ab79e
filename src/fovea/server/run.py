"""uvicorn with draining: after SIGTERM it refuses new requests, finishes the running ones, and exits with 0.

uvicorn alone waits until all connections are closed before it runs the application's shutdown. Here the
server's state is set to draining as soon as the signal arrives. The next request of a keep-alive client is
then refused, and /ready answers with 503 at once.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from fovea.server.state import ServerState

log = logging.getLogger("fovea.server")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, state: ServerState, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._state = state
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self._state.draining and self._state.client.status == "ready":
            log.info(
                "%s: draining for up to %g s", signal.Signals(sig).name, self._state.settings.drain_seconds
            )
        self._state.draining = True
        super().handle_exit(sig, frame)
        # uvicorn raises captured signals again at its end, which would change the exit code of a drained
        # server.
        self._captured_signals.clear()


def stop() -> None:
    """Stop the running server, as SIGTERM does. Can be called from any thread."""
    os.kill(os.getpid(), signal.SIGTERM)


def serve(app: FastAPI, host: str, port: int, *, on_start: Callable[[], None] = lambda: None) -> None:
    """Run a server until SIGTERM or SIGINT.

    on_start: called once the port is open. Raises OSError if the port is in use.
    """
    state: ServerState = app.state.fovea
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, math.ceil(state.settings.drain_seconds)),
        loop="uvloop",
        http="httptools",
    )
    _Server(config, state, on_start).run()
