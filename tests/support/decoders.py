"""The processes that decode media, shared by the servers and commands of a test run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fovea.media.limits import MediaLimits
from fovea.media.sandbox import pool as pools
from fovea.media.sandbox.pool import WorkerPool
from fovea.media.sandbox.process import WorkerKind, WorkerProcess

MOST = 2
"""Idle processes of a kind that are kept."""


@contextmanager
def kept_decoders() -> Iterator[None]:
    """In the block, a pool that closes leaves its idle processes to the next one with the same limits.

    Every server and every command would start processes of its own, for a fifth of a second each.
    """
    spare: defaultdict[tuple[WorkerKind, MediaLimits], list[WorkerProcess]] = defaultdict(list)
    close = WorkerPool.close

    def start(kind: WorkerKind, limits: MediaLimits, tenant: str = "") -> WorkerProcess:
        while left := spare[kind, limits]:
            worker = left.pop()
            if worker.alive:
                worker.tenant = tenant
                return worker
            worker.end()
        return WorkerProcess(kind, limits, tenant)

    def leave(pool: WorkerPool) -> None:
        left = spare[pool.kind, pool._limits]
        with pool._changed:
            while pool._free and len(left) < MOST:
                left.append(worker := pool._free.pop())
                pool._all.discard(worker)
        close(pool)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "WorkerProcess", start)
        patch.setattr(WorkerPool, "close", leave)
        yield
    for workers in spare.values():
        for worker in workers:
            worker.end()
