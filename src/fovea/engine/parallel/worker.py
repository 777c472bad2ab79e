"""A worker: a process that computes a share of a model, as the driver announces.

    python -m fovea.engine.parallel.worker

The driver writes what to load to its standard input, and keeps that open. When it closes, the driver has
gone, and the worker ends at once, whatever it does. A worker that a launcher has started (`places`) has no
such input. It ends when the store or a connection is gone.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import BinaryIO

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fovea.core.errors import EngineError, FoveaError
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_share
from fovea.engine.parallel.group import Group, Pulse
from fovea.engine.parallel.mirror import Mirror
from fovea.engine.parallel.places import GPUS, Place, own_gpu
from fovea.engine.parallel.shares import Grid
from fovea.kernels.choose import set_threads
from fovea.observe.logs import formatter

MEET_S = 3600.0
"""Seconds in which the processes of an engine must come to the store."""
log = logging.getLogger("fovea.engine")


@dataclass(frozen=True, slots=True)
class Start:
    """All that a worker needs to know.

    model, config: what to load.
    place: its place.
    log_level: of its log, which goes to standard error.
    """

    model: str
    config: EngineConfig
    place: Place
    log_level: int = logging.INFO


def open_store(place: Place) -> Store:
    """Return a connection to the store at which the processes meet, and keep the store if it is ours."""
    return _prefixed(place, _tcp_store(place, hosts=place.hosts_store))


def connect_again(place: Place) -> Store:
    """Return another connection to the store, for another thread."""
    return _prefixed(place, _tcp_store(place, hosts=False))


def _tcp_store(place: Place, *, hosts: bool) -> Store:
    timeout = timedelta(seconds=MEET_S)
    return TCPStore(place.host, place.port, None, hosts, timeout, wait_for_workers=False)


def _prefixed(place: Place, store: Store) -> Store:
    return PrefixStore(f"fovea/{place.run}", store)


def run_worker(start: Start) -> int:
    """Load a share, and compute with it until the driver ends. Returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the driver ends its requests first, and then its workers
    place, parallel = start.place, start.config.parallel
    # Before CUDA is used. Triton's kernels run on the first GPU that a process sees.
    os.environ[GPUS] = own_gpu(os.environ, place.local_rank)
    grid = Grid(place.rank, parallel.tensor_parallel, parallel.pipeline_parallel)
    group = Group(grid, open_store(place), parallel.parallel_timeout_s, local=is_local(place))
    set_threads(start.config.model.threads)
    pulse = Pulse(connect_again(place), place.rank, lambda: os._exit(1))
    try:
        model, device = load_share(start.model, start.config, group)
    except Exception as error:
        log.exception("rank %d cannot load its share", place.rank)
        group.board.report(place.rank, _public(error))
        return 1
    group.board.report(place.rank, None)
    group.connect(device)
    log.info("rank %d of %d is ready", place.rank, place.size)
    try:
        Mirror(model, group, device).run()
    except Exception:
        log.exception("rank %d ends", place.rank)
        # Threads of a group that has lost a member cannot always be joined.
        logging.shutdown()
        os._exit(1)
    pulse.stop()
    logging.shutdown()
    os._exit(0)


def is_local(place: Place) -> bool:
    """Whether all processes are on this machine."""
    return place.host in ("127.0.0.1", "localhost", "::1")


def _public(error: Exception) -> FoveaError:
    return error if isinstance(error, FoveaError) else EngineError(f"{type(error).__name__}: {error}")


def _end_with(source: BinaryIO) -> None:
    """End this process when the input ends."""
    while source.read(1):
        pass
    os._exit(1)


def main() -> None:
    start: Start = pickle.load(sys.stdin.buffer)
    logging.basicConfig(level="WARNING", stream=sys.stderr)
    logging.getLogger().handlers[0].setFormatter(formatter("text"))
    logging.getLogger("fovea").setLevel(start.log_level)
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), name="fovea-input", daemon=True).start()
    sys.exit(run_worker(start))


if __name__ == "__main__":
    from fovea.engine.parallel.worker import main as own_main  # so that pickles name this module

    own_main()
