"""The process of an engine: serves one `EngineClient` to the server that started it.

    python -m fovea.engine.process.host DESCRIPTOR

The server leads: signals that reach the whole group or the control group of the server change nothing here.
The process ends when the server closes the connection, which it does by dying, too. A thread watches the
connection from the beginning, so that a process that is still loading, or is stuck, ends as well.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from fovea.core import progress
from fovea.core.errors import EngineError, FoveaError
from fovea.core.hardware import share_machine
from fovea.core.media import Abandoned, Rgb
from fovea.core.progress import Loaded
from fovea.core.types import Delta, GenerationRequest
from fovea.engine.process.messages import LENGTH, Entry, Kind, pack_answers, unpack
from fovea.engine.process.road import Road
from fovea.engine.process.sources import EngineSource, Hosted, share_weights
from fovea.observe.logs import formatter

STATE_S = 0.2
"""Seconds between two looks at the engine's status and figures, which the server gets if they changed."""
COLLECT_S = 2.0
"""Seconds between two collections of garbage."""
GRACE_S = 10.0
"""Seconds in which the process ends by itself after the server has gone."""
SWITCH_S = 0.001
"""Seconds after which a thread of Python that computes lets another one run."""
WAKE_S = 0.05
"""How often a thread that waits for frames asks whether they are still wanted."""
log = logging.getLogger("fovea.engine")


class Place(NamedTuple):
    """The part of the machine that a process has for itself, and what it shares with others.

    cores: the CPUs on which it runs; (): those of the server.
    processes: number of engine processes of the server, this one included.
    pool: descriptor of the pool of weights that they share; None: there is none.
    """

    cores: tuple[int, ...] = ()
    processes: int = 1
    pool: int | None = None

    def take(self) -> None:
        """Move this process to its place. To be called before torch is imported and threads are started."""
        share_machine(self.processes)
        if self.cores:
            os.sched_setaffinity(0, self.cores)


class Start(NamedTuple):
    """The first message: what to load, how to write the log, the folder of the road for pixels, the place."""

    source: EngineSource
    log_level: int
    log_format: str
    road: Path
    place: Place


class RemotePixels:
    """Pixels of an image that the server decodes when the encoder needs them. A `PixelSource`."""

    def __init__(self, host: Host, number: int, size: int, seconds: float) -> None:
        self._host = host
        self._number = number
        self.size = size
        self.seconds = seconds

    def read(self) -> Rgb:
        ((pixels, self.seconds),) = self._host.ask(self._number, "pixels")
        return memoryview(pixels)

    def file(self) -> bytes:
        ((data, _),) = self._host.ask(self._number, "file")
        return bytes(data)

    def __del__(self) -> None:
        self._host.forget(self._number)


class RemoteFrames:
    """Frames of a video that the server decodes. A `FrameSource`."""

    def __init__(self, host: Host, number: int) -> None:
        self._host = host
        self._number = number

    def check(self, indices: Sequence[int]) -> None:
        for _ in self._host.ask(self._number, "check", list(indices)):
            pass

    def read(self, indices: Sequence[int], abandoned: Callable[[], bool] = lambda: False) -> Iterator[Rgb]:
        items = self._host.ask(self._number, "frames", list(indices), abandoned=abandoned)
        return (memoryview(frame) for frame, _ in items)

    def __del__(self) -> None:
        self._host.forget(self._number)


class Host(asyncio.Protocol):
    """Serves an engine over a connection. All methods but `ask` and `forget` are for the event loop."""

    def __init__(self, engine: Hosted, road: Road) -> None:
        self._engine = engine
        self._road = road
        self._loop = asyncio.get_running_loop()
        self._data = bytearray()
        self._out: list[Entry] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._asks: dict[int, queue.SimpleQueue[tuple[Any, ...]]] = {}
        self._numbers = itertools.count()
        self._transport: asyncio.Transport
        self.gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set()
        for answers in list(self._asks.values()):
            answers.put((Kind.FAILED, EngineError("the server has gone")))

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._data)
            end = LENGTH.size + size
            if len(self._data) < end:
                return
            message = bytes(memoryview(self._data)[LENGTH.size : end])
            del self._data[:end]
            self._take(unpack(message, self._borrow))

    def post(self, *entry: Any) -> None:
        """Send an entry, together with those of all tasks that can run now: a step is one message."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(entry)

    def _flush(self) -> None:
        entries, self._out = self._out, []
        if not self._transport.is_closing():
            self._transport.write(pack_answers(entries))

    def ask(
        self, source: int, method: str, *args: Any, abandoned: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[bytes | bytearray, float]]:
        """Ask the server for the items of one of its sources. For a worker thread, which waits.

        Each comes with the seconds that decoding it took. Raises the error of the source.
        """
        number, ended = next(self._numbers), False
        answers = self._asks[number] = queue.SimpleQueue()
        self._post_soon(Kind.ASK, number, source, method, args)
        told = False
        try:
            while True:
                try:
                    kind, *values = answers.get(timeout=WAKE_S)
                except queue.Empty:
                    if not told and abandoned():
                        told = True
                        self._post_soon(Kind.MORE, number, True)
                    continue
                if kind is not Kind.ITEM:
                    ended = True
                    if kind is Kind.FAILED:
                        raise values[0]
                    return
                sent, seconds = values
                yield self._road.receive(sent), seconds
                if abandoned():
                    raise Abandoned
                self._post_soon(Kind.MORE, number, False)
        finally:
            del self._asks[number]
            if not ended:
                self._post_soon(Kind.MORE, number, True)

    def forget(self, source: int) -> None:
        """Tell the server that the engine has no use for a source any more. For any thread."""
        self._post_soon(Kind.FORGET, source)

    def _post_soon(self, *entry: Any) -> None:
        with suppress(RuntimeError):  # the event loop is closed, so the server has gone
            self._loop.call_soon_threadsafe(self.post, *entry)

    def _borrow(self, number: int, is_video: bool, size: int, seconds: float) -> RemotePixels | RemoteFrames:
        return RemoteFrames(self, number) if is_video else RemotePixels(self, number, size, seconds)

    def _take(self, entry: Entry) -> None:
        kind, number, *values = entry
        if kind is Kind.STREAM:
            self._begin(number, self._stream(number, values[0]))
        elif kind is Kind.CALL:
            self._begin(number, self._call(number, *values))
        elif kind is Kind.CANCEL:
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
        elif (answers := self._asks.get(number)) is not None:
            answers.put((kind, *values))

    def _begin(self, number: int, work: Any) -> None:
        task = self._tasks[number] = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _stream(self, number: int, request: GenerationRequest) -> None:
        try:
            async with aclosing(self._engine.stream(request)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    self._post_delta(number, delta)
        except Exception as error:  # noqa: BLE001 - any error is that of the request
            self.post(Kind.ERROR, number, public(error))
        else:
            self.post(Kind.END, number)

    def _post_delta(self, number: int, delta: Delta) -> None:
        """Send a delta. Most have only text and tokens; a tuple of these takes a third of the time."""
        rest = delta.logprobs, delta.prompt_ids, delta.prompt_logprobs, delta.images, delta.offers
        if delta.finish_reason or any(rest):
            self.post(Kind.DELTA, number, delta)
            return
        fields = delta.index, delta.text, delta.token_ids, delta.thinking
        self.post(Kind.TEXT, number, *fields, delta.prompt_tokens, delta.cached_tokens)

    async def _call(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        method = getattr(self._engine, name)
        try:
            if asyncio.iscoroutinefunction(method):
                result = await method(*args)
            else:
                result = await asyncio.to_thread(method, *args)
        except Exception as error:  # noqa: BLE001 - any error is that of the call
            self.post(Kind.ERROR, number, public(error))
        else:
            self.post(Kind.RESULT, number, result)

    async def report(self) -> None:
        """Send status and figures whenever they changed, until cancelled."""
        last: tuple[str, Mapping[str, float]] | None = None
        for tick in itertools.count(1):
            state = self._engine.status, dict(self._engine.stats())
            if state != last:
                self.post(Kind.STATE, 0, *state)
                last = state
            await asyncio.sleep(STATE_S)
            if tick % round(COLLECT_S / STATE_S) == 0 and any(gc.get_count()):
                gc.collect()


def public(error: Exception) -> FoveaError:
    """Return the error that the server gets. The text of an unexpected one stays in the log."""
    if isinstance(error, FoveaError):
        return error
    log.error("a call of the engine failed", exc_info=error)
    return EngineError("the engine failed; see the server's log")


async def serve(engine: Hosted, connection: socket.socket, road: Road) -> None:
    """Serve an engine until the server closes the connection, then stop the engine."""
    host = Host(engine, road)
    await asyncio.get_running_loop().create_connection(lambda: host, sock=connection)
    host.post(Kind.READY, 0, engine.info, engine.config.schedule.max_in_flight)
    reporting = asyncio.create_task(host.report())
    await host.gone.wait()
    reporting.cancel()
    await engine.close()


class Watch:
    """Ends this process after the server has closed the connection. loaded: whether it can end by itself."""

    def __init__(self, connection: socket.socket) -> None:
        self.loaded = False
        self._connection = connection
        threading.Thread(target=self._run, name="fovea-watch", daemon=True).start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._connection.fileno(), getattr(select, "POLLRDHUP", select.POLLHUP))
        poll.poll()
        if self.loaded:
            time.sleep(GRACE_S)
        os._exit(1)


class Reporter:
    """Tells the server how far the weights are, each whole percent once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._percent = connection, -1

    def __call__(self, loaded: Loaded) -> None:
        if loaded.percent != self._percent:
            self._percent = loaded.percent
            self._connection.sendall(pack_answers([(Kind.LOADED, 0, *loaded)]))


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, lambda *_: None
        )  # unlike SIG_IGN, programs that are started here do not inherit it
    start = read_start(connection)
    start.place.take()
    logging.basicConfig(level="WARNING", stream=sys.stderr)
    logging.getLogger().handlers[0].setFormatter(formatter(start.log_format))
    logging.getLogger("fovea").setLevel(start.log_level)
    watch = Watch(connection)
    try:
        if start.place.pool is not None:
            share_weights(start.place.pool)
        with progress.watch(Reporter(connection)):
            engine = start.source.load()
    except Exception as error:  # noqa: BLE001 - the server reports it
        connection.sendall(pack_answers([(Kind.ERROR, 0, public(error))]))
        return
    road = Road(start.road, sends=False)
    watch.loaded = True
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(engine, connection, road))
    road.close()


def read_start(connection: socket.socket) -> Start:
    """Read the first message, which the server sends at once."""
    (size,) = LENGTH.unpack(connection.recv(LENGTH.size, socket.MSG_WAITALL))
    start: Any = unpack(connection.recv(size, socket.MSG_WAITALL), lambda *_: None)
    return Start(*start)


if __name__ == "__main__":
    from fovea.engine.process.host import main as own_main  # so that pickles name this module, not __main__

    own_main()
