"""The worker processes of a server: who is free, and who is started again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fovea.core.errors import Unavailable
from fovea.media.limits import MediaLimits
from fovea.media.sandbox.messages import WAKE_S
from fovea.media.sandbox.process import WorkerFailed, WorkerKind, WorkerProcess

log = logging.getLogger("fovea.media")

LIFETIME = 2_000
"""Files after which a worker is replaced by a fresh one, so that a leak in a decoder does not grow."""


class WorkerPool:
    """Worker processes of one kind. Thread-safe.

    kind: what they decode.
    size: most processes at a time. They are started when they are needed.
    limits: limits on the media, and on time and memory of a worker.
    crashes: how many workers died while they decoded.
    ended: how many the server ended while they decoded: their time ran out, or their client left.
    """

    def __init__(self, kind: WorkerKind, size: int, limits: MediaLimits) -> None:
        self.crashes = 0
        self.ended = 0
        self._kind = kind
        self._size = size
        self._limits = limits
        self._free: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()
        self._starting = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def processes(self) -> tuple[WorkerProcess, ...]:
        """All processes that run now."""
        with self._changed:
            return tuple(self._all)

    def warm_up(self, *, keep: bool = True) -> None:
        """Start a first worker, so that the first request does not wait for it. Blocks: call in a thread.

        A worker that does not start is logged, and tried again when it is needed.

        keep: False: the worker was started to find out that it can be, and ends at once, for its memory.
        """
        try:
            with self.lease() as worker:
                log.info("%ss are decoded in processes with: %s", self._kind, ", ".join(worker.measures))
        except WorkerFailed as error:
            log.warning("%ss cannot be decoded now: %s", self._kind, error)
        except Unavailable:  # the server has ended meanwhile
            return
        if not keep:
            self._end_free()

    @contextmanager
    def lease(self, each_wait: Callable[[], None] = lambda: None) -> Iterator[WorkerProcess]:
        """Yield a worker for this thread alone; wait for one if all are busy.

        A worker that ended meanwhile is not used again.

        each_wait: called again and again while all are busy; it may raise.
        Raises WorkerFailed if a new process does not start, Unavailable if the pool is closed.
        """
        worker = self._take(each_wait)
        try:
            yield worker
        finally:
            self._put_back(worker)

    def close(self) -> None:
        """End all processes, also those at work."""
        with self._changed:
            self._closed = True
            free, self._free = self._free, []
            self._changed.notify_all()
            working = self._all.difference(free)
        for worker in free:
            self._end(worker)
        for worker in working:
            worker.kill()  # its thread notices, and closes the rest

    def _take(self, each_wait: Callable[[], None]) -> WorkerProcess:
        dead: list[WorkerProcess] = []
        with self._changed:
            while not self._free and len(self._all) + self._starting >= self._size and not self._closed:
                each_wait()
                self._changed.wait(WAKE_S)
            self._refuse_if_closed()
            while self._free:
                worker = self._free.pop()
                if worker.alive:
                    return worker
                self._all.discard(worker)
                dead.append(worker)
            self._starting += 1
        for worker in dead:
            worker.end()
        try:
            worker = WorkerProcess(self._kind, self._limits)
            with self._changed:
                self._all.add(worker)
        finally:
            with self._changed:
                self._starting -= 1
                self._changed.notify()
        try:
            self._refuse_if_closed()
        except Unavailable:
            self._end(worker)
            raise
        return worker

    def _put_back(self, worker: WorkerProcess) -> None:
        with self._changed:
            alive = worker.alive
            if not alive and not self._closed:
                self.crashes += worker.crashed
                self.ended += not worker.crashed
            if alive and worker.answered < LIFETIME and not self._closed:
                self._free.append(worker)
                self._changed.notify()
                return
        self._end(worker)

    def _end_free(self) -> None:
        with self._changed:
            free, self._free = self._free, []
        for worker in free:
            self._end(worker)

    def _end(self, worker: WorkerProcess) -> None:
        worker.end()
        with self._changed:
            self._all.discard(worker)
            self._changed.notify()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Unavailable("the server is shutting down")
