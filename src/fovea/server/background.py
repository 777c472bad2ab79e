"""A server in a thread, for clients in the same process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from fastapi import FastAPI

from fovea.core.errors import EngineError
from fovea.http.listener import bind
from fovea.server.run import server_of


@contextmanager
def serving(
    app: FastAPI, new_loop: Callable[[], asyncio.AbstractEventLoop], *, drain_s: float = 0.0
) -> Iterator[str]:
    """Serve the application on a free port of this machine until the block ends, and yield its address.

    The port is open when the block begins. The application ends with the block. If the engine dies, only the
    server ends, and not the process.

    new_loop: creates the event loop of the server.
    drain_s: seconds that running requests have when the block ends; afterwards they get an error.
    Raises EngineError if the application does not start, ConfigError for a TLS certificate that cannot be
    used.
    """
    up = threading.Event()
    sockets = bind("127.0.0.1", 0)
    address = f"127.0.0.1:{sockets[0].getsockname()[1]}"
    try:
        server = server_of(app, sockets, on_start=up.set, drain_s=drain_s, loop="none")
    except BaseException:
        sockets[0].close()
        raise

    def run() -> None:
        try:
            # uvicorn calls sys.exit if an application does not start, but only this thread must end.
            with suppress(SystemExit), asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(server.serve())
        finally:
            up.set()  # after a failure, too, so that the caller does not wait forever

    thread = threading.Thread(target=run, name="fovea-server", daemon=True)
    thread.start()
    up.wait()
    if not server.started:
        thread.join()
        raise EngineError("the server did not start; see the log")
    try:
        yield f"{server.scheme}://{address}"
    finally:
        server.should_exit = True
        thread.join()
