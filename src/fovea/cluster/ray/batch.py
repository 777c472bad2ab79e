"""Runs a batch over Ray Data: blocks go to actors, and the states of their files come back.

Neither images nor answers travel through Ray: a row is the number of a block. The actor reads the block's
inputs and images itself, bounded by its requests in flight, and writes the block's file. So the object store
and the driver hold a few bytes per block, whatever the images are.

Why not more of Ray Data (2.60): `read_images` and `read_binary_files` list every path and size on the driver
before the first is read (`FileBasedDatasource`). `CheckpointConfig` writes a file of ids beside each block of
answers, and when a run continues, every filter actor loads all ids into memory; failed rows are never asked
again. Here one small file per block is the answers and the checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import uuid
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import ray.data
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fovea.api.questions import Stopped
from fovea.cluster.batch import (
    BlockResult,
    Job,
    Runner,
    Workers,
    answer_block,
    create_job,
    image_lines,
    question_lines,
    read_job,
)
from fovea.cluster.ray.folders import ImageReader, find_inputs, open_folder
from fovea.core.errors import ConfigError, FoveaError

BLOCKS_AT_ONCE = 2
"""Blocks that an actor answers at the same time, so that the engine still has work while one block ends."""
QUEUED = 4
"""Blocks that an actor has, those that wait included."""
CONNECT_S = 10.0
RETRIES = 4
"""How often a block is given to an actor again because the actor died."""

OpenRunner = Callable[[Callable[[str], bytes]], Awaitable[Runner]]
"""Makes a runner in a worker. Its argument returns the bytes of an image for its name."""


@dataclass(frozen=True)
class BatchTask:
    """The work of all workers of a run. It travels to them.

    out: folder of the job. job_id: its id.
    images: folder to which names of images are relative.
    open_runner: makes the worker's runner, in its event loop.
    """

    out: str
    job_id: str
    images: str
    open_runner: OpenRunner


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to Ray, and disconnect at the end. Raises ConfigError.

    address: "local": a Ray of this machine that ends with the run; "auto" or HOST:PORT: a running one.
    """
    if address.startswith("ray://"):
        raise ConfigError(
            f"the cluster is {address}, an address of Ray Client; accepted: local, auto or HOST:PORT, on a "
            "machine of the cluster (`ray job submit` starts a command there)",
            param="cluster",
        )
    _check_listening(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # At a lower level, Ray logs that a lost driver's actors could not be started again: they end with it.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no running Ray was found ({address}): {' '.join(str(error).split())}; accepted: the address of "
            "one, or local, which starts one",
            param="cluster",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_listening(address: str) -> None:
    """Refuse HOST:PORT where nothing listens; Ray would try for minutes. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"no Ray at {address}: {error}; accepted: local, auto or HOST:PORT", param="cluster"
        ) from error


def nodes() -> list[Mapping[str, float]]:
    """Return the resources of each node that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def list_inputs(out: str, source: str, settings: Mapping[str, Any], block_lines: int) -> Job:
    """List the inputs, in a process that ends afterwards: pyarrow lists a folder of an object store at once.

    It runs on this node, because only this one surely has a local folder.
    Raises InvalidRequest if there is no input, and ConfigError if a folder cannot be used.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    lister = ray.remote(num_cpus=0, max_calls=1, max_retries=0, scheduling_strategy=here)(_list_inputs)
    try:
        job: Job = ray.get(lister.remote(out, source, settings, block_lines))
    except RayTaskError as error:
        if isinstance(error.cause, FoveaError):
            raise error.cause from None
        raise
    return job


def _list_inputs(out: str, source: str, settings: Mapping[str, Any], block_lines: int) -> Job:
    folder, name = find_inputs(source)
    inputs = open_folder(folder)
    lines = image_lines(inputs) if name is None else question_lines(inputs, name)
    try:
        return create_job(open_folder(out), lines, source, settings, block_lines, uuid.uuid4().hex)
    except OSError as error:
        raise ConfigError(f"the inputs of {source} cannot be listed into {out}: {error}") from error


def ask_blocks(blocks: Sequence[int], task: BatchTask, workers: Workers) -> Iterator[BlockResult]:
    """Give blocks to actors, and yield their results in the order in which they come.

    A block whose actors died several times is left out. Raises Stopped if a worker cannot go on, FoveaError
    if Ray itself fails.
    """
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.max_errored_blocks = -1
    _keep_off_the_terminal()
    pool = ray.data.ActorPoolStrategy(
        size=min(workers.number, len(blocks)),
        max_tasks_in_flight_per_actor=QUEUED,
        max_concurrent_calls_per_actor=BLOCKS_AT_ONCE,
        enable_true_multi_threading=True,
    )
    rows = ray.data.from_items([{"block": block} for block in blocks], override_num_blocks=len(blocks))
    with warnings.catch_warnings():
        # Ray 2.60 announces that options without an argument of their own go in 2.64; the extra pins 2.60.
        warnings.simplefilter("ignore", DeprecationWarning)
        dataset = rows.map_batches(
            BlockWorker,
            batch_size=1,
            compute=pool,
            fn_constructor_args=[task],
            num_cpus=workers.cpus,
            num_gpus=workers.gpus or None,
            max_task_retries=RETRIES,
            scheduling_strategy="SPREAD",
        )
    try:
        for row in dataset.iter_rows():
            if row["stopped"]:
                raise Stopped(row["stopped"])
            yield BlockResult(int(row["block"]), int(row["lines"]), int(row["failed"]))
    except RayError as error:
        raise ConfigError(f"Ray failed: {' '.join(str(error).split())[:500]}") from error


def _keep_off_the_terminal() -> None:
    """Leave Ray Data's log to the files of the session: it prints stack traces of deaths that are handled."""
    log = logging.getLogger("ray.data")
    log.propagate = False
    for handler in log.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL)


class BlockWorker:
    """An actor that answers blocks, several at the same time, with one runner in an event loop of its own.

    What ends the whole run is returned as a value, because Ray would give the block to the next worker.
    """

    def __init__(self, task: BatchTask) -> None:
        self._task = task
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._opening: asyncio.Task[tuple[Job, Runner]] | None = None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        block = int(batch["block"][0])
        return asyncio.run_coroutine_threadsafe(self._answer(block), self._loop).result()

    async def _answer(self, block: int) -> dict[str, list[Any]]:
        result, stopped = BlockResult(block, 0, 0), ""
        try:
            if self._opening is None:
                self._opening = asyncio.create_task(self._open())
            job, runner = await asyncio.shield(self._opening)
            result = await answer_block(open_folder(self._task.out), job, block, runner)
        except Stopped as error:
            stopped = str(error)
        except FoveaError as error:
            stopped = error.message
        except OSError as error:
            stopped = f"{self._task.out} cannot be read or written: {error}"
        return {
            "block": [block], "lines": [result.lines], "failed": [result.failed], "stopped": [stopped],
        }  # fmt: skip

    async def _open(self) -> tuple[Job, Runner]:
        """Check that this node sees the same folders as the driver, and make the runner."""
        where = os.uname().nodename
        job = await asyncio.to_thread(read_job, open_folder(self._task.out))
        if job is None or job.id != self._task.job_id:
            raise ConfigError(
                f"{where} does not see the folder {self._task.out}; accepted: a folder that every node "
                "mounts, or one in an object store",
                param="output",
            )
        await asyncio.to_thread(find_inputs, self._task.images)
        reader = ImageReader(self._task.images)
        return job, await self._task.open_runner(reader.read)
