"""uvicorn with a drain that works: on SIGTERM new requests are refused, running ones finish, then the exit code is 0.

uvicorn waits for connections before it runs the application's shutdown; the state is told to drain as soon as the
signal arrives, so keep-alive clients learn of it with their next request and /ready turns 503 at once.
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
    def __init__(self, config: uvicorn.Config, state: ServerState, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._state = state
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self._state.draining and self._state.client.status == "ready":
            log.info(
                "%s: draining for up to %g s", signal.Signals(sig).name, self._state.settings.drain_seconds
            )
        self._state.draining = True
        super().handle_exit(sig, frame)
        # uvicorn raises captured signals again when it is done; a drained server has ended well.
        self._captured_signals.clear()


def stop() -> None:
    """End the running server as SIGTERM would. From any thread."""
    os.kill(os.getpid(), signal.SIGTERM)


def serve(app: FastAPI, host: str, port: int, *, started: Callable[[], None] = lambda: None) -> None:
    """Run until SIGTERM or SIGINT. `started` is called once the port is open. Raises OSError when it is taken."""
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
    _Server(config, state, started).run()
