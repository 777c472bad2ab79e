"""The worker processes of a server: who is free, and who is started again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from fovea.core.errors import Unavailable
from fovea.media.limits import MediaLimits
from fovea.media.sandbox.messages import WAKE_S
from fovea.media.sandbox.process import WorkerKind, WorkerNotStarted, WorkerProcess

log = logging.getLogger("fovea.media")

LIFETIME = 2_000
"""Files after which a worker is replaced by a fresh one, so that a leak in a decoder does not grow."""


class WorkerPool:
    """Worker processes of one kind. Thread-safe.

    A worker serves one tenant. If another tenant needs it, it is replaced: a decoder that was taken
    over by a file of one tenant never sees a file of the next. While more tenants than workers send files,
    one more process is started ahead, so that nobody waits for the start.

    kind: what they decode.
    size: most processes at a time. They are started when they are needed.
    limits: limits on the media, and on time and memory of a worker.
    crashes: how many workers died while they decoded.
    ended: how many the server ended while they decoded: their time ran out, or their client left.
    """

    def __init__(self, kind: WorkerKind, size: int, limits: MediaLimits) -> None:
        self.crashes = 0
        self.ended = 0
        self.kind = kind
        self._size = size
        self._limits = limits
        self._free: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()
        self._starting = 0
        self._spare: WorkerProcess | None = None
        self._starting_spare = False
        self._closed = False
        self._changed = threading.Condition()

    @property
    def processes(self) -> tuple[WorkerProcess, ...]:
        """All processes that run now."""
        with self._changed:
            return (*self._all, *((self._spare,) if self._spare else ()))

    def warm_up(self, *, keep: bool = True) -> None:
        """Start a first worker, so that the first request does not wait for it. Blocks: call in a thread.

        A worker that does not start is logged, and tried again when it is needed.

        keep: False: the worker was started to find out that it can be, and ends at once, for its memory.
        """
        try:
            with self.lease() as worker:
                log.info("%ss are decoded in processes with: %s", self.kind, ", ".join(worker.measures))
        except Unavailable as error:
            if not self._closed:  # otherwise the server has ended meanwhile
                log.warning("%ss cannot be decoded now: %s", self.kind, error.message)
            return
        if not keep:
            self._end_free()

    @contextmanager
    def lease(
        self, each_wait: Callable[[], None] = lambda: None, tenant: str = ""
    ) -> Iterator[WorkerProcess]:
        """Yield a worker for this thread alone; wait for one if all are busy.

        A worker that ended meanwhile is not used again.

        each_wait: called again and again while all are busy; it may raise.
        tenant: owner of the files that it will decode; "" if tenants are not told apart.
        Raises Unavailable if no new process starts in two attempts, or the pool is closed.
        """
        worker = self._take(each_wait, tenant)
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
            free += [self._spare] if self._spare else []
            self._spare = None
        for worker in free:
            self._end(worker)
        for worker in working:
            worker.kill()  # its thread notices, and closes the rest

    def _take(self, each_wait: Callable[[], None], tenant: str) -> WorkerProcess:
        with self._changed:
            while not self._free and len(self._all) + self._starting >= self._size and not self._closed:
                each_wait()
                self._changed.wait(WAKE_S)
            self._refuse_if_closed()
            found = self._free_one(tenant)
            if found is not None:
                return found
            ended = [worker for worker in self._free if not worker.alive]
            replaces = not ended and len(self._all) + self._starting >= self._size
            if replaces:
                ended = self._free[:1]  # of another tenant, and longest unused
            self._free = [worker for worker in self._free if worker not in ended]
            self._all.difference_update(ended)
            self._starting += 1
        if not replaces:
            for worker in ended:
                worker.end()
        try:
            worker = self._started(tenant)
            with self._changed:
                self._all.add(worker)
        finally:
            with self._changed:
                self._starting -= 1
                self._changed.notify()
            if replaces:
                args = (ended,)
                threading.Thread(target=self._replace, args=args, name="fovea-decoder", daemon=True).start()
        try:
            self._refuse_if_closed()
        except Unavailable:
            self._end(worker)
            raise
        return worker

    def _free_one(self, tenant: str) -> WorkerProcess | None:
        """Take a free worker that has seen no file, or none of another tenant. The lock is held."""
        for worker in reversed(self._free):  # the last one used has its memory in the processor's caches
            if worker.alive and (worker.tenant == tenant or not worker.answered):
                self._free.remove(worker)
                worker.tenant = tenant
                return worker
        return None

    def _started(self, tenant: str) -> WorkerProcess:
        """Return a worker that has seen no file: the spare one, or a new one.

        Raises Unavailable after two attempts.
        """
        with self._changed:
            spare, self._spare = self._spare, None
        if spare is not None:
            if spare.alive:
                spare.tenant = tenant
                return spare
            spare.end()
        for attempt in (1, 2):
            try:
                return WorkerProcess(self.kind, self._limits, tenant)
            except WorkerNotStarted as error:
                if attempt == 2:
                    raise unavailable(self.kind, error) from error
                log.warning("a process that decodes %ss did not start: %s; trying again", self.kind, error)
        raise AssertionError

    def _replace(self, ended: list[WorkerProcess]) -> None:
        """End workers, and start a spare one if there is none: the next tenant will need it soon.

        Both take long, so it runs in a thread of its own.
        """
        for worker in ended:
            worker.end()
        with self._changed:
            if self._starting_spare or self._spare is not None or self._closed:
                return
            self._starting_spare = True
        self._start_spare()

    def _start_spare(self) -> None:
        spare = None
        with suppress(WorkerNotStarted):  # the next tenant's file will start one, or say why it cannot
            spare = WorkerProcess(self.kind, self._limits)
        with self._changed:
            self._starting_spare = False
            if not self._closed:
                self._spare, spare = spare, None
        if spare is not None:
            spare.end()

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


def unavailable(kind: WorkerKind, error: Exception) -> Unavailable:
    """The error of a file that could not be decoded for a reason of the server's own."""
    return Unavailable(
        f"the server has no process that could decode the {kind} now: {error}; the {kind} is not the cause, "
        "so try again later",
        code="decoder_unavailable",
        scope="request",
    )
