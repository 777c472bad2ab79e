"""The driver's side: starts the other processes of an engine, meets them, and watches over them."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from signal import Signals

import torch
from torch._C._distributed_c10d import Store, TCPStore

from fovea.core.errors import ConfigError, EngineError, FoveaError
from fovea.engine.config import EngineConfig
from fovea.engine.layers.ranks import ALONE, Ranks
from fovea.engine.parallel.group import LOCALHOST, Group, Watch
from fovea.engine.parallel.places import Place, place_of
from fovea.engine.parallel.shares import Grid
from fovea.engine.parallel.worker import Start, connect_again, is_local, open_store
from fovea.engine.step.executor import LostRank

LOOK_S = 0.1
"""How often a driver that waits for a worker looks whether it still lives."""
TELL_S = 30.0
"""How often the log tells for which workers a driver waits."""
END_S = 10.0
"""Seconds that workers have to end by themselves."""
log = logging.getLogger("fovea.engine")


def start_ranks(model: str, config: EngineConfig) -> Ranks:
    """Start the other processes of an engine, which load their shares. Returns those of the driver.

    config: from `divided`.
    Raises ConfigError if a launcher has started this process as a worker.
    """
    if config.parallel.size == 1:
        return ALONE
    if config.model.compile != "off":
        raise ConfigError(
            "compile is for one process; accepted with tensor_parallel and pipeline_parallel: off",
            param="compile",
        )
    if config.model.device.startswith("cuda:"):
        raise ConfigError(
            f"device is {config.model.device}, and each process has a GPU of its own; accepted with several "
            "processes: auto, cuda, cpu (CUDA_VISIBLE_DEVICES chooses GPUs)",
            param="device",
        )
    place = place_of(config, os.environ)
    if place is None:
        _check_gpus(config)
        return _start_here(model, config)
    if place.rank:
        raise ConfigError(
            f"this is process {place.rank} of {place.size}; only number 0 has an engine, the others run "
            "`fovea serve` as workers",
            param="tensor_parallel",
        )
    return DriverGroup(config, place, open_store(place), [])


def _check_gpus(config: EngineConfig) -> None:
    """Raise ConfigError if this machine has some GPUs, but not one for each process."""
    count = 0 if config.model.device == "cpu" else torch.cuda.device_count()
    if 0 < count < config.parallel.size:
        raise ConfigError(
            f"tensor_parallel times pipeline_parallel is {config.parallel.size}, and this machine has "
            f"{count} GPUs that are visible; accepted: up to {count}, or device cpu",
            param="tensor_parallel",
        )


def _start_here(model: str, config: EngineConfig) -> Ranks:
    """Start one process for each rank on this machine."""
    listener = socket.create_server((LOCALHOST, 0))  # by itself, the store would listen on all interfaces
    port = listener.getsockname()[1]
    here = TCPStore(LOCALHOST, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    place = Place(0, config.parallel.size, 0, LOCALHOST, port, hosts_store=False)
    processes: list[subprocess.Popen[bytes]] = []
    level = logging.getLogger("fovea").getEffectiveLevel()
    try:
        for rank in range(1, place.size):
            own = replace(place, rank=rank, local_rank=rank)
            processes.append(_start(Start(model, config, own, level)))
    except BaseException:
        for process in processes:
            process.kill()
        raise
    group = DriverGroup(config, place, open_store(place), processes)
    group.keep(here)
    return group


def _start(start: Start) -> subprocess.Popen[bytes]:
    """Start a worker. It is in a session of its own, without Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "fovea.engine.parallel.worker"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(start))
    process.stdin.flush()
    return process


class DriverGroup(Group):
    """The driver among the processes of its engine.

    processes: those that it has started itself, from rank 1 on.
    """

    def __init__(
        self, config: EngineConfig, place: Place, store: Store, processes: list[subprocess.Popen[bytes]]
    ) -> None:
        parallel = config.parallel
        grid = Grid(0, parallel.tensor_parallel, parallel.pipeline_parallel)
        super().__init__(grid, store, parallel.parallel_timeout_s, local=is_local(place))
        self.processes = processes
        self._place, self._timeout_s = place, float(parallel.parallel_timeout_s)
        self._watch: Watch | None = None
        self._on_loss: Callable[[Exception], None] = lambda error: None
        self._kept_store: Store | None = None
        self._met = self._ended = False

    def keep(self, store: Store) -> None:
        """Keep the store open as long as this group lives."""
        self._kept_store = store

    def meet(self, device: torch.device) -> None:
        """Wait until all processes have loaded their shares, and connect to them.

        Raises the error of one that could not, or EngineError.
        """
        self._watch = Watch(connect_again(self._place), self.size, self._timeout_s, self._gone, self._lose)
        try:
            told = time.monotonic()
            while waiting := [rank for rank in range(1, self.size) if not self.board.reported(rank)]:
                if time.monotonic() - told > TELL_S:
                    told = time.monotonic()
                    log.info("waiting for %s to load", ", ".join(f"rank {rank}" for rank in waiting))
                self._raise_reported(waiting)
                if self._failure is not None:
                    raise EngineError(self._failure)
                time.sleep(LOOK_S)
            self._raise_reported(())
            self.connect(device)
        except BaseException:
            self.close()
            raise
        self._met = True

    def _raise_reported(self, waiting: Collection[int]) -> None:
        """Raise the error of a process that could not load its share. waiting: those that still load."""
        for rank in range(1, self.size):
            if rank not in waiting and (error := self.board.error_of(rank)) is not None:
                raise _named(error, rank)

    def _gone(self) -> dict[int, str]:
        """Return the processes of this machine that have ended, and how."""
        found = {}
        for rank, process in enumerate(self.processes, 1):
            status = process.poll()
            if status is not None:
                found[rank] = f"exit status {status}" if status >= 0 else Signals(-status).name
        return found

    def missing(self) -> str:
        if self._watch is None:
            return ""
        end = time.monotonic() + 1.0
        while time.monotonic() < end and not self._gone():
            time.sleep(0.02)  # a process that was killed may not be known to have ended yet
        return self._watch.missing(min(3.0, self._timeout_s))

    def on_loss(self, act: Callable[[Exception], None]) -> None:
        self._on_loss = act

    def _lose(self, reason: str) -> None:
        if self._ended:
            return
        if self._met:
            log.error("the engine ends: %s", reason)
        self.fail(reason)
        self._on_loss(LostRank(reason))

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self._watch is not None:
            self._watch.stop()
            if self._met and self._failure is None and not self._within:
                with suppress(LostRank):
                    self.announce("end")
        end = time.monotonic() + (END_S if self._met and self._failure is None else 0.0)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            process.kill()
            process.wait()
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()


def _named(error: BaseException, rank: int) -> FoveaError:
    """Name the process in its error."""
    if isinstance(error, FoveaError):
        error.message = f"rank {rank}: {error.message}"
        error.args = (error.message,)
        return error
    return EngineError(f"rank {rank}: {error}")
