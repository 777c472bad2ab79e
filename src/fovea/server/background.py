"""A server in a thread, for clients in the same process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from fastapi import FastAPI

from fovea.core.errors import EngineError


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, up: threading.Event) -> None:
        super().__init__(config)
        self._up = up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._up.set()


@contextmanager
def serving(app: FastAPI, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> Iterator[str]:
    """Serve the application on a free port of this machine until the block ends, and yield its address.

    The port is open when the block begins. The application ends with the block.

    new_loop: creates the event loop of the server.
    Raises EngineError if the application does not start.
    """
    up = threading.Event()
    # Without IPPROTO_TCP, asyncio would not recognize TCP and leave Nagle's algorithm on: events would wait
    # for ACKs.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", access_log=False, http="httptools", loop="none")
        server = _Server(config, up)

        def run() -> None:
            try:
                # uvicorn calls sys.exit if an application does not start, but only this thread must end.
                with suppress(SystemExit), asyncio.Runner(loop_factory=new_loop) as runner:
                    runner.run(server.serve(sockets=[listener]))
            finally:
                up.set()  # after a failure, too, so that the caller does not wait forever

        thread = threading.Thread(target=run, name="fovea-server", daemon=True)
        thread.start()
        up.wait()
        if not server.started:
            thread.join()
            raise EngineError("the server did not start; see the log")
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
