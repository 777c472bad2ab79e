"""Runs a server in the main thread until a signal arrives or its engine dies.

After SIGTERM the port stays open for `lame_duck_s` and as long as requests run: /ready and new requests
answer 503. Running requests have `drain_seconds` to finish. `http/server.py` has the whole order.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fovea.core.errors import EngineError
from fovea.core.protocols import EngineClient
from fovea.http.listener import allowed_connections, bind
from fovea.http.server import Hooks, Server

if TYPE_CHECKING:  # an application collects garbage as this module says
    from fovea.server.app import App

EVERY_S = 2.0
"""Seconds between two collections of a running server."""


def keep_for_life() -> None:
    """Collect garbage now, and leave all objects that remain out of later collections.

    A full collection visits every container object while no other thread runs. Imported modules and the model
    are 250,000 of them and take a quarter of a second. Any request that creates some thousand objects, such
    as a conversation of 4096 messages, would set off such a collection. Call it when the server is ready.
    """
    gc.collect()
    gc.freeze()


async def collect_regularly() -> None:
    """Collect garbage every EVERY_S seconds until cancelled, if anything was created since the last time."""
    while True:
        await asyncio.sleep(EVERY_S)
        if gc.get_freeze_count() and sum(gc.get_count()):
            gc.collect()


SWITCH_S = 0.001
"""Seconds after which a thread of Python that computes lets another one run, above all the event loop."""


def stop() -> None:
    """Stop the running server, as SIGTERM does. Can be called from any thread."""
    os.kill(os.getpid(), signal.SIGTERM)


def serve(app: App, host: str, port: int, *, on_start: Callable[[], None] = lambda: None) -> int:
    """Run a server until SIGTERM or SIGINT, and return the exit status for the process.

    The status is 0 after a signal, and 70 if the engine has died.

    app: an application of `create_app`.
    on_start: called once the port is open.
    Raises OSError if the port is in use, ConfigError for a TLS certificate that cannot be used.
    """
    state = app.state

    def start() -> None:
        threading.Thread(target=state.media.warm_up, name="fovea-warm-up", daemon=True).start()
        on_start()

    sys.setswitchinterval(SWITCH_S)
    server = server_of(app, bind(host, port), on_start=start, drain_s=state.settings.drain_seconds)
    keep_for_life()
    server.run()
    return server.exit_status


def server_of(
    app: App,
    sockets: list[socket.socket],
    *,
    on_start: Callable[[], None] = lambda: None,
    drain_s: float = 0.0,
) -> Server:
    """Return a server for an application.

    app: an application of `create_app`.
    sockets: listening sockets.
    on_start: called once connections are accepted.
    drain_s: seconds that running requests have at the end.
    """
    engine = app.state.engine
    hooks = Hooks(
        on_start=on_start,
        on_drain=app.drain,
        on_cut=app.cut,
        is_ready=lambda: engine.status == "ready",
        has_died=EngineWatch(engine).has_died,
        drain_s=drain_s,
    )
    table = app.connections
    table.capacity = allowed_connections(table.capacity)
    return Server(app, sockets, app.state.settings.http, table, hooks)


class EngineWatch:
    """Notices that an engine has stopped on its own.

    An engine that never was ready is still loading, or could not be loaded; others report that.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._was_ready = False

    def has_died(self) -> bool:
        """Tell whether the engine was ready once and has stopped."""
        status = self._client.status
        self._was_ready = self._was_ready or status == "ready"
        return self._was_ready and status == "stopped"


@contextmanager
def serving(
    app: App, new_loop: Callable[[], asyncio.AbstractEventLoop], *, drain_s: float = 0.0
) -> Iterator[str]:
    """Serve the application on a free port of this machine until the block ends, and yield its address.

    The port is open when the block begins. The application ends with the block. If the engine dies, only the
    server ends, and not the process.

    new_loop: creates the event loop of the server.
    drain_s: seconds that running requests have when the block ends; afterwards they get an error.
    Raises what the application raises if it does not start, ConfigError for a TLS certificate that cannot be
    used.
    """
    up = threading.Event()
    sockets = bind("127.0.0.1", 0)
    address = f"127.0.0.1:{sockets[0].getsockname()[1]}"
    try:
        server = server_of(app, sockets, on_start=up.set, drain_s=drain_s)
    except BaseException:
        sockets[0].close()
        raise

    failures: list[Exception] = []

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(server.serve())
        except Exception as error:  # noqa: BLE001 - the caller raises it again
            failures.append(error)
        finally:
            up.set()  # after a failure, too, so that the caller does not wait forever

    thread = threading.Thread(target=run, name="fovea-server", daemon=True)
    thread.start()
    up.wait()
    if not server.started:
        thread.join()
        raise failures[0] if failures else EngineError("the server did not start; see the log")
    try:
        yield f"{server.scheme}://{address}"
    finally:
        server.should_exit = True
        thread.join()
