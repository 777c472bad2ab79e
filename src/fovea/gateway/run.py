"""Runs a gateway: one process, or several that share its port.

The first process opens the port and starts the workers; each accepts connections from it. A worker that dies
is replaced. After SIGTERM every worker drains, as a server does (`fovea.http.server`).
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

from fovea.gateway.build import Setup, create_gateway
from fovea.http.address import Proxies
from fovea.http.listener import allowed_connections, bind
from fovea.http.server import Hooks, Server
from fovea.http.table import Connections

log = logging.getLogger("fovea.gateway")
RESTART_S = 1.0
"""Seconds before a worker that died is replaced."""
MakeSetup = Callable[[], Setup]
"""Reads the configuration. It is called in each process, because a setup cannot be sent to another one."""


def serve(make_setup: MakeSetup, host: str, port: int, on_start: Callable[[], None] = lambda: None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status.

    make_setup: a function that can be pickled, if there are several workers.
    on_start: called once the port is open.
    Raises ConfigError, and OSError if the port is in use.
    """
    setup = make_setup()
    sockets = bind(host, port)
    if setup.settings.workers == 1:
        return run_worker(setup, sockets, on_start)
    return Supervisor(make_setup, setup.settings.workers, sockets).run(on_start)


def run_worker(
    setup: Setup, sockets: list[socket.socket], on_start: Callable[[], None] = lambda: None
) -> int:
    """Serve in this process."""
    settings = setup.settings
    gateway = create_gateway(setup, time.monotonic)
    services = gateway.services
    table = Connections(
        allowed_connections(settings.http.max_connections),
        settings.http.max_connections_per_address,
        exempt=Proxies(settings.http.trusted_proxies).__contains__,
        observer=services.metrics,
    )

    def drain() -> None:
        services.draining = True

    hooks = Hooks(on_start=on_start, on_drain=drain, on_cut=gateway.cut, drain_s=settings.drain_seconds)
    server = Server(gateway, sockets, settings.http, table, hooks)
    gc.collect()
    gc.freeze()
    server.run()
    return server.exit_status


class Supervisor:
    """Starts the workers, replaces those that die, and ends them all.

    sockets: listening sockets that all workers share.
    """

    def __init__(self, make_setup: MakeSetup, workers: int, sockets: list[socket.socket]) -> None:
        self._make_setup = make_setup
        self._sockets = sockets
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[SpawnProcess | None] = [None] * workers
        self._signals: list[int] = []
        self._folder = Path(tempfile.mkdtemp(prefix="fovea-gateway-"))

    def run(self, on_start: Callable[[], None]) -> int:
        """Supervise until a signal arrives and all workers have ended."""
        (self._folder / "metrics").mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(self._folder / "metrics")
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._note)
        try:
            for number in range(len(self._workers)):
                self._start(number)
            on_start()
            while not self._signals:
                self._replace_dead()
                time.sleep(0.1)
            return self._end()
        finally:
            for sock in self._sockets:
                sock.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> int:
        """Pass signals on until all workers have ended, and return the exit status.

        A second signal ends a drain early. A worker that was only starting ends by the signal itself, which
        is not a failure.
        """
        workers = [worker for worker in self._workers if worker is not None]
        passed = 0
        while any(worker.is_alive() for worker in workers):
            for number in self._signals[passed:]:
                passed += 1
                for worker in workers:
                    if worker.pid is not None and worker.is_alive():
                        os.kill(worker.pid, number)
            time.sleep(0.05)
        ends = {-number for number in self._signals}
        return max(
            (abs(worker.exitcode or 0) for worker in workers if worker.exitcode not in ends), default=0
        )

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _start(self, number: int) -> None:
        process = self._context.Process(
            target=_work,
            args=(
                self._make_setup,
                self._sockets,
                self._folder / "drains.json",
                logging.getLogger("fovea").level,
            ),
            name=f"fovea-gateway-{number}",
        )
        process.start()
        self._workers[number] = process

    def _replace_dead(self) -> None:
        for number, worker in enumerate(self._workers):
            if worker is not None and not worker.is_alive():
                log.error("worker %d has died with status %s, and is replaced", number, worker.exitcode)
                _forget_gauges(worker.pid)
                time.sleep(RESTART_S)
                if not self._signals:
                    self._start(number)


def _forget_gauges(pid: int | None) -> None:
    """Drop the gauges of a worker that has died."""
    from prometheus_client.multiprocess import mark_process_dead

    if pid is not None:
        mark_process_dead(pid)  # type: ignore[no-untyped-call]


def _work(make_setup: MakeSetup, sockets: list[socket.socket], drains: Path, level: int) -> None:
    """Run one worker; the entry of its process."""
    os.setpgid(0, 0)  # so that Ctrl-C reaches the first process alone, which passes it on once
    logging.basicConfig(
        level="WARNING", format="%(asctime)s %(levelname).1s %(name)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("fovea").setLevel(level)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    sys.exit(run_worker(replace(make_setup(), drains=drains), sockets))


def _end_with_parent() -> None:
    """Drain this worker if the first process dies: nobody would replace or end it any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        log.error("the first process has died, so this worker ends")
        os.kill(os.getpid(), signal.SIGTERM)
