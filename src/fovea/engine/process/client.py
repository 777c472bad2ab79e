"""The server's side of an engine in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from fovea.core.errors import EngineError, FoveaError, Unavailable
from fovea.core.media import Abandoned, Rgb
from fovea.core.progress import report
from fovea.core.protocols import CacheStage, EngineStatus
from fovea.core.types import Delta, GenerationRequest, ModelInfo, Prompt, Rendered
from fovea.engine.process.host import Place, Start
from fovea.engine.process.messages import LENGTH, Entry, Kind, pack, unpack_answers
from fovea.engine.process.road import Road
from fovea.engine.process.sources import EngineSource
from fovea.engine.request.admission import Admission, Ticket

END_S = 20.0
"""Seconds that the process has to end after the connection was closed. Then it is killed."""
CALL_TIMEOUT_S = 70.0
"""Seconds that a thread waits for a call. The engine itself gives up somewhat earlier."""
READERS = 4
"""Threads that decode pixels and frames for the engine."""
FRAMES_AHEAD = 2
"""Frames of a video that are sent before the engine has taken the first."""
ALONE = Place()
"""Place of a process that is the only one, and runs where the server does."""
DIED = "the engine stopped unexpectedly; see the server's log"
log = logging.getLogger("fovea.server")


class Box:
    """The entries of one stream that its reader has not taken yet. For the event loop."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self._entries: list[Entry] = []
        self._filled = asyncio.Event()

    def put(self, entry: Entry) -> None:
        if entry[0] in (Kind.END, Kind.ERROR):
            self.ticket.leave()
        self._entries.append(entry)
        self._filled.set()

    async def take(self) -> list[Entry]:
        """Wait for an entry, and return all that are there."""
        await self._filled.wait()
        self._filled.clear()
        entries, self._entries = self._entries, []
        return entries


class RemoteEngine:
    """An engine in a process of its own. It implements `core.protocols.EngineClient`, for one event loop.

    pid: of the process.

    The figures of `stats` are up to 0.2 seconds old.
    """

    def __init__(self, source: EngineSource, *, log_format: str = "text", place: Place = ALONE) -> None:
        """Start the process and wait until its engine is loaded. Raises the errors of loading.

        place: where the process runs, and the pool of weights that it inherits.
        Raises EngineError if the process ends before that.
        """
        self._road = Road(sends=True)
        self._connection, self._process = _start(() if place.pool is None else (place.pool,))
        self.pid = self._process.pid
        self._file = self._connection.makefile("rb", buffering=1 << 20)
        self._sources: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._boxes: dict[int, Box] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._asks: dict[int, Frames] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining = self._gone = False
        self._status: EngineStatus = "ready"
        self._stats: Mapping[str, float] = {}
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        try:
            level = logging.getLogger("fovea").getEffectiveLevel()
            start = Start(source, level, log_format, self._road.folder, place)
            self._connection.sendall(_framed(pack(tuple(start), self._lend)))
            self._info, most = self._wait_until_ready()
        except BaseException:
            self._connection.close()
            self._kill()
            self._road.close()
            raise
        self._admission = Admission(most, 1, 1, refuse=False)
        self._readers = ThreadPoolExecutor(READERS, "fovea-pixels")
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._read, "fovea-from-engine"), (self._write, "fovea-to-engine"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def status(self) -> EngineStatus:
        return "stopped" if self._gone or self._draining else self._status

    def check_room(self, choices: int, reserved: int = 0) -> None:
        self._require_running()
        self._admission.check(choices, reserved)

    def _require_running(self) -> None:
        if self.status != "ready":
            raise Unavailable("the server is shutting down" if self._draining else "the engine has stopped")

    async def stream(self, request: GenerationRequest, /) -> AsyncIterator[Delta]:
        """Yield the deltas of a request. A reader that is late gets the text of several at once."""
        self._require_running()
        self._loop = asyncio.get_running_loop()
        number, box = next(self._numbers), Box(self._admission.enter(request.sampling.n))
        self._boxes[number] = box
        if self._gone:  # it went between the check and now
            box.put((Kind.ERROR, number, EngineError(DIED)))
        ended = False
        try:
            self._send(Kind.STREAM, number, request)
            while not ended:
                entries = await box.take()
                ended = entries[-1][0] in (Kind.END, Kind.ERROR)
                for delta in deltas_of(entries):
                    yield delta
        finally:
            box.ticket.leave()
            del self._boxes[number]
            if not ended:
                self._send(Kind.CANCEL, number)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        tokens: list[int] = await asyncio.wrap_future(self._call("tokenize", prompt))
        return tokens

    async def render(self, request: GenerationRequest, /) -> Rendered:
        rendered: Rendered = await asyncio.wrap_future(self._call("render", request))
        return rendered

    async def detokenize(self, ids: Sequence[int]) -> str:
        text: str = await asyncio.wrap_future(self._call("detokenize", list(ids)))
        return text

    def stats(self) -> Mapping[str, float]:
        return self._stats

    async def release_offers(self, offers: Sequence[Mapping[str, Any]]) -> None:
        await asyncio.wrap_future(self._call("release_offers", list(offers)))

    def clear_caches(self, *stages: CacheStage) -> None:
        try:
            self._call("clear_caches", *stages).result(CALL_TIMEOUT_S)
        except TimeoutError:
            raise EngineError(f"the engine did not answer within {CALL_TIMEOUT_S:g} s") from None

    async def close(self, drain_s: float = 0.0) -> None:
        self._draining = True
        if not self._gone:
            with suppress(EngineError, Unavailable):
                await asyncio.wrap_future(self._call("close", drain_s))
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        """Close the connection, at which the process ends, and wait for it."""
        self._outbox.put(None)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            log.warning("the engine's process %d does not end; it is killed", self.pid)
            self._kill()
        self._readers.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads:
            thread.join(END_S)
        self._connection.close()
        self._road.close()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _call(self, name: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        number = next(self._numbers)
        self._calls[number] = future
        future.add_done_callback(lambda _: self._calls.pop(number, None))
        self._send(Kind.CALL, number, name, args)
        if self._gone:  # noted before or after the call was, it ends
            self._fail_calls()
        return future

    def _send(self, *entry: Any) -> None:
        self._outbox.put(_framed(pack(entry, self._lend)))

    def _lend(self, source: Any) -> int:
        number = next(self._numbers)
        self._sources[number] = source
        return number

    def _wait_until_ready(self) -> tuple[ModelInfo, int]:
        while (entries := self._receive()) is not None and entries[0][0] is Kind.LOADED:
            report(*entries[0][2:])
        if entries is None:
            raise EngineError(f"the engine's process ended while it loaded: {self._reason()}")
        kind, _, *values = entries[0]
        if kind is Kind.ERROR:
            raise values[0]
        for later in entries[1:]:
            self._note(later)
        info, most = values
        return info, most

    def _receive(self) -> list[Entry] | None:
        """Return the entries of the next message; None: the connection was closed."""
        try:
            head = self._file.read(LENGTH.size)
            if len(head) < LENGTH.size:
                return None
            (size,) = LENGTH.unpack(head)
            data = self._file.read(size)
        except (OSError, ValueError):
            return None
        return unpack_answers(data) if len(data) == size else None

    def _read(self) -> None:
        """Take messages, in a thread of its own, until the connection is closed."""
        while (entries := self._receive()) is not None:
            for_loop = [entry for entry in entries if not self._note(entry)]
            if for_loop:
                self._deliver_soon(for_loop)
        self._lose()

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            with suppress(OSError):  # the reader notices that the process has gone
                self._connection.sendall(data)

    def _note(self, entry: Entry) -> bool:
        """Take an entry that belongs to no stream. Returns whether it was one."""
        kind, number = entry[:2]
        if kind is Kind.STATE:
            self._status, self._stats = entry[2:]
        elif kind is Kind.ASK:
            frames = self._asks[number] = Frames()
            with suppress(RuntimeError):  # the server ends
                self._readers.submit(self._answer, number, frames, *entry[2:])
        elif kind is Kind.MORE:
            if (asked := self._asks.get(number)) is not None:
                asked.more(entry[2])
        elif kind is Kind.FORGET:
            self._sources.pop(number, None)
        elif number in self._calls:
            if kind is Kind.ERROR:
                self._calls[number].set_exception(entry[2])
            else:
                self._calls[number].set_result(entry[2])
        else:
            return False
        return True

    def _deliver_soon(self, entries: list[Entry]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it was closed
                self._loop.call_soon_threadsafe(self._deliver, entries)

    def _deliver(self, entries: list[Entry]) -> None:
        for entry in entries:
            if (box := self._boxes.get(entry[1])) is not None:
                box.put(entry)

    def _answer(self, number: int, frames: Frames, source: int, method: str, args: tuple[Any, ...]) -> None:
        """Answer a question of the engine about pixels or frames, in a worker thread."""
        try:
            for data, seconds in _items(self._sources[source], method, args, frames):
                self._send(Kind.ITEM, number, self._road.send(data), seconds)
                frames.wait()
            self._send(Kind.DONE, number)
        except (FoveaError, Abandoned) as error:
            self._send(Kind.FAILED, number, error)
        except Exception:
            log.exception("the pixels of an image or video could not be read")
            text = "the pixels could not be read; see the server's log"
            self._send(Kind.FAILED, number, EngineError(text))
        finally:
            self._asks.pop(number, None)

    def _lose(self) -> None:
        """End everything that waits for the engine, because its process has gone."""
        self._gone = True
        self._outbox.put(None)
        if not self._draining:
            log.error("the engine's process %d has ended: %s", self.pid, self._reason())
        for frames in list(self._asks.values()):
            frames.more(True)
        self._fail_calls()
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._fail_streams)

    def _fail_calls(self) -> None:
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(EngineError(DIED))

    def _fail_streams(self) -> None:
        for number, box in self._boxes.items():
            box.put((Kind.ERROR, number, EngineError(DIED)))

    def _reason(self) -> str:
        """Say how the process has ended."""
        try:
            status = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if status >= 0:
            return f"exit status {status}"
        return signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"


class Frames:
    """How many frames the engine has room for. abandoned: whether it wants no more."""

    def __init__(self) -> None:
        self.abandoned = False
        self._room = threading.Semaphore(FRAMES_AHEAD)

    def more(self, abandoned: bool) -> None:
        self.abandoned = self.abandoned or abandoned
        self._room.release()

    def wait(self) -> None:
        """Wait for room. Raises Abandoned."""
        self._room.acquire()
        if self.abandoned:
            raise Abandoned

    def is_abandoned(self) -> bool:
        return self.abandoned


def _items(
    source: Any, method: str, args: tuple[Any, ...], frames: Frames
) -> Iterator[tuple[bytes | memoryview, float]]:
    """Yield what a question asks for: pixels, a file or frames, each with the seconds of decoding."""
    if method == "pixels":
        pixels = source if isinstance(source, Rgb) else source.read()
        yield pixels, 0.0 if isinstance(source, Rgb) else source.seconds
    elif method == "file":
        yield b"" if isinstance(source, Rgb) else source.file(), 0.0
    elif method == "check":
        source.check(*args)
    else:
        for frame in source.read(*args, frames.is_abandoned):
            yield frame, 0.0


def deltas_of(entries: Sequence[Entry]) -> Iterator[Delta]:
    """Yield the deltas of entries of one stream, the text of each choice joined. Raises their error."""
    joined: dict[int, Delta] = {}
    for kind, _, *values in entries:
        if kind is Kind.TEXT:
            index, text, ids, thinking, prompt, cached = values
            if (before := joined.get(index)) is not None:
                text, ids = before.text + text, before.token_ids + ids
            joined[index] = Delta(
                index, text, ids, thinking=thinking, prompt_tokens=prompt, cached_tokens=cached
            )
            continue
        yield from joined.values()
        joined.clear()
        if kind is Kind.ERROR:
            raise values[0]
        if kind is Kind.DELTA:
            yield values[0]
    yield from joined.values()


def _framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def _start(inherited: Sequence[int]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process, and return the connection to it. It is in a session of its own, without Ctrl-C.

    inherited: descriptors that it gets.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fovea.engine.process.host", str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=(theirs.fileno(), *inherited),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    return ours, process
