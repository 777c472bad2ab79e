"""A server on its listening sockets: its deadlines, signals, and the order in which it ends.

SERVING    until a signal arrives or the engine dies
DRAINING   the port is open and new requests get 503; running requests have `drain_s` seconds. It lasts at
           least `lame_duck_s` seconds, in which load balancers notice it
CUTTING    running requests get an error, streams as their last event; the port stays open for the rest of
           `lame_duck_s`
ENDED      the port closes
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from enum import IntEnum
from types import FrameType
from typing import Any

import uvloop

from fovea.http.listener import Listener
from fovea.http.patience import Rules
from fovea.http.protocol import Application, HttpProtocol
from fovea.http.refusals import log
from fovea.http.settings import HttpSettings
from fovea.http.table import Connections
from fovea.http.tls import Certificate

CUT_S = 3.0
"""Seconds in which errors reach their clients; afterwards the tasks of their requests are cancelled."""


class Stage(IntEnum):
    """The stages of a server's life."""

    SERVING = 0
    DRAINING = 1
    CUTTING = 2
    ENDED = 3


class Drain:
    """The stage of one server.

    stage: changes only in `begin` and `advance`.
    """

    def __init__(self) -> None:
        self.stage = Stage.SERVING
        self._lame_end = math.inf
        self._drain_end = math.inf
        self._cut_end = math.inf

    def begin(self, now: float, drain_s: float, lame_duck_s: float) -> None:
        """Start to drain. A later call has no effect."""
        if self.stage is Stage.SERVING:
            self.stage = Stage.DRAINING
            self._drain_end = now + drain_s
            self._lame_end = now + lame_duck_s

    def hurry(self, now: float) -> None:
        """Let all that remains end now, with errors for running requests."""
        if self.stage is not Stage.SERVING:
            self._drain_end = min(self._drain_end, now)
            self._lame_end = min(self._lame_end, now)

    def advance(self, now: float, running: int) -> Stage:
        """Return the stage at a time.

        running: requests that are being answered.
        """
        if self.stage is Stage.DRAINING and running and now >= self._drain_end:
            self.stage = Stage.CUTTING
            self._cut_end = now + CUT_S
        over = self.stage in (Stage.DRAINING, Stage.CUTTING) and now >= self._lame_end
        if over and (not running or now >= self._cut_end):
            self.stage = Stage.ENDED
        return self.stage


TICK_S = 0.1
"""Seconds between two looks at deadlines, signals and the engine."""
DEAD_DRAIN_S = 5.0
"""Seconds that open requests have to get their errors after the engine has died."""
ENGINE_DIED = 70
"""Exit status of a server whose engine has died: EX_SOFTWARE of sysexits.h."""


@dataclass(frozen=True)
class Hooks:
    """The application's part in the life of a server.

    on_start: called once the port is open.
    on_drain: called when the server begins to drain.
    on_cut: called with the reason when running requests have to end.
    is_ready: whether the application serves requests; a server that never did ends without a lame-duck time.
    has_died: whether the application can never answer again.
    drain_s: seconds that running requests have after a signal.
    """

    on_start: Callable[[], None] = lambda: None
    on_drain: Callable[[], None] = lambda: None
    on_cut: Callable[[str], None] = lambda reason: None
    is_ready: Callable[[], bool] = lambda: True
    has_died: Callable[[], bool] = lambda: False
    drain_s: float = 0.0


class Server:
    """One server on some listening sockets.

    exit_status: status for the process after `serve`: 0, or ENGINE_DIED.
    started: whether the port is open.
    should_exit: set it, from any thread, to end the server.
    """

    def __init__(
        self,
        app: Application,
        sockets: Sequence[socket.socket],
        settings: HttpSettings,
        table: Connections,
        hooks: Hooks | None = None,
    ) -> None:
        """sockets: listening sockets; the server closes them.

        settings, table: limits and counts of connections.
        hooks: the application's part; None: it has none.

        Raises ConfigError for a certificate that cannot be used.
        """
        self.exit_status = 0
        self.started = False
        self.should_exit = False
        self._app = app
        self._listening = sockets
        self._settings = settings
        self._table = table
        self._rules = Rules(settings)
        self._hooks = hooks or Hooks()
        self._certificate = Certificate.of(settings)
        self._tls = None if self._certificate is None else self._certificate.context()
        self._drain = Drain()
        self._signals: list[int] = []
        self._cut = False

    @property
    def scheme(self) -> str:
        """The scheme of the server's addresses: "http" or "https"."""
        return "http" if self._tls is None else "https"

    def run(self) -> None:
        """Serve in this thread, with an event loop of its own. Raises what `serve` raises."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.serve())

    async def serve(self) -> None:
        """Serve until a signal arrives, the program wants to stop, or the engine has died.

        Raises FoveaError if the application does not start.
        """
        with self._noting_signals():
            try:
                await self._app.start()
            except BaseException:
                for sock in self._listening:
                    sock.close()
                raise
            self._set_headers()
            self._listener = Listener(
                self._listening, self._table, self._rules, self._make_protocol, self._tls
            )
            self._listener.start()
            self.started = True
            self._hooks.on_start()
            await self._watch()
            await self._end()

    async def _watch(self) -> None:
        """Look at deadlines, signals and the engine until the server has drained."""
        watch = None
        if self._certificate is not None:
            watch = asyncio.create_task(self._certificate.watch(self._install))
        while not self._is_over(time.monotonic()):
            self._set_headers()
            self._table.sweep(time.monotonic())
            await asyncio.sleep(TICK_S)
        if watch is not None:
            watch.cancel()

    def _set_headers(self) -> None:
        self._rules.headers[:] = [(b"date", formatdate(usegmt=True).encode())]

    def _is_over(self, now: float) -> bool:
        if self._drain.stage is Stage.SERVING:
            self._look_for_an_end(now)
        elif len(self._signals) > 1:
            self._drain.hurry(now)
        stage = self._drain.advance(now, len(self._rules.tasks))
        if stage is Stage.CUTTING and not self._cut:
            self._cut_answers()
        return stage is Stage.ENDED

    def _look_for_an_end(self, now: float) -> None:
        """Begin to drain if a signal has arrived, the program wants to stop, or the engine has died."""
        hooks = self._hooks
        if self._signals:
            # A person at a terminal (SIGINT) has no load balancer that needs time to notice.
            lame = self._signals[0] == signal.SIGTERM and hooks.is_ready()
            name = signal.Signals(self._signals[0]).name
            log.info("%s: draining for up to %g s", name, hooks.drain_s)
            self._begin(now, hooks.drain_s, self._settings.lame_duck_s if lame else 0.0)
        elif self.should_exit:
            self._begin(now, hooks.drain_s, 0.0)
        elif hooks.has_died():
            log.error("the engine has stopped, so this server ends with status %d", ENGINE_DIED)
            self.exit_status = ENGINE_DIED
            self._table.draining = True
            self._drain.begin(now, DEAD_DRAIN_S, 0.0)

    def _begin(self, now: float, drain_s: float, lame_duck_s: float) -> None:
        self._table.draining = True
        self._hooks.on_drain()
        self._drain.begin(now, drain_s, lame_duck_s)

    def _cut_answers(self) -> None:
        self._cut = True
        reason = "the engine has stopped" if self.exit_status else "the server is shutting down"
        log.warning("%d requests get an error: %s", len(self._rules.tasks), reason)
        self._hooks.on_cut(reason)
        for entry in self._table:
            entry.owner.cut()

    async def _end(self) -> None:
        """Close the port and all connections, then end the application."""
        tasks = self._rules.tasks
        self._listener.close()
        for entry in self._table:
            entry.owner.shutdown()
        await self._until(lambda: not tasks, 0.0)
        for task in tasks:
            task.cancel()
        await self._until(lambda: not tasks, CUT_S)
        await self._until(lambda: not len(self._table), CUT_S)
        for entry in self._table:
            entry.owner.abort()
        await self._app.stop()

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition is true, or for some seconds. The event loop runs once in any case."""
        end = time.monotonic() + seconds
        await asyncio.sleep(0)
        while not condition() and time.monotonic() < end:
            await asyncio.sleep(TICK_S / 5)

    @contextmanager
    def _noting_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT until the block ends. Only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal. The second one ends the drain, the third one the process."""
        self._signals.append(sig)
        if len(self._signals) == 1:
            self._table.draining = True
            self._hooks.on_drain()
        elif len(self._signals) > 2:
            signal.signal(sig, signal.SIG_DFL)
            os.kill(os.getpid(), sig)

    def _make_protocol(self, address: str, tls: bool) -> HttpProtocol:
        return HttpProtocol(self._app, self._table, self._rules, address, tls=tls)

    def _install(self, context: Any) -> None:
        self._listener.tls = context
