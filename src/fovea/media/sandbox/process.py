"""One worker process, seen from the server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import asdict
from typing import Literal

import numpy as np

from fovea.core.media import Rgb
from fovea.media.limits import MIB, MediaLimits
from fovea.media.sandbox.messages import Channel, Message, SharedMemory, TooSlow, WorkerGone

WorkerKind = Literal["image", "video", "pdf"]
KEPT_BYTES = 64 << 20
"""Shared memory up to this size stays for the next file: pages that are new each time cost milliseconds."""
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    # Pictures of up to 32 MiB are decoded into memory of the one before, which costs no page faults.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
PIECE = 1 << 20
"""Bytes that are copied at once while no other thread may run."""
START_S = 60.0
"""Seconds in which a new process has to be ready. Its imports take a fraction of a second."""


class WorkerFailed(Exception):
    """The worker ended, or was ended, while it answered. The message tells why, for clients."""


class WorkerCrashed(WorkerFailed):
    """The worker died while it answered. After the second time, the file is the cause."""


class WorkerKilled(WorkerCrashed):
    """Somebody else killed the worker, for example the system to free memory. The file is not the cause."""


class WorkerNotStarted(WorkerFailed):
    """There is no process, or no memory to share with it. No file is the cause. The message tells why."""


class WorkerProcess:
    """A process that decodes files of one kind, one at a time. For one thread at a time.

    measures: what it gave up, see `jail.enter`.
    answered: number of files that it has decoded or refused.
    tenant: owner of the files that it decodes. Once it has answered, it decodes no other's.
    crashed: whether it died, or answered what cannot be read, while the server waited for its answer.
    """

    def __init__(self, kind: WorkerKind, limits: MediaLimits, tenant: str = "") -> None:
        """Start the process. Raises WorkerNotStarted if it does not become ready."""
        self.answered = 0
        self.tenant = tenant
        self.crashed = False
        self._memory: SharedMemory | None = None
        self._ended = False
        try:
            self._channel, self._process = _start(kind)
        except OSError as error:  # no descriptors, processes or memory left
            raise WorkerNotStarted(f"it could not be started: {error.strerror}") from error
        values = {name: value for name, value in asdict(limits).items() if name != "file_root"}
        try:
            self._channel.send({"limits": values, "memory_bytes": limits.decode_memory_mib * MIB})
            ready, _ = self._channel.receive(time.monotonic() + START_S)
        except (WorkerGone, TooSlow) as error:
            reason = f"it was not ready after {START_S:g} s" if isinstance(error, TooSlow) else self._reason()
            self.end()
            raise WorkerNotStarted(f"it ended before it was ready ({reason})") from error
        self.measures: tuple[str, ...] = tuple(ready["ready"])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(
        self,
        question: Message,
        data: bytes,
        seconds: float,
        *,
        room: int = 0,
        each_wait: Callable[[], None] | None = None,
    ) -> Generator[tuple[Message, Callable[[], Rgb]], None, None]:
        """Ask about a file, and yield each answer with a function that copies the worker's output.

        data: the file.
        seconds: time limit for all answers together.
        room: bytes of the worker's output. File and output are in shared memory.
        each_wait: called again and again while the worker works; it may raise.

        A generator that is closed before its end, and any error, ends the process, because nobody knows what
        it does now. Raises WorkerFailed, also WorkerNotStarted if there is no memory for the file.
        """
        deadline = time.monotonic() + seconds
        done = False
        try:
            memory = self._send_question({**question, "seconds": seconds, "room": room}, data)
            begin, end = len(data), len(data) + room
            while not done:
                answer, fds = self._channel.receive(deadline, each_wait)
                for fd in fds:
                    os.close(fd)
                done = "frame" not in answer
                yield answer, lambda: _copy_of(memory, begin, end)
                if not done:
                    self._channel.send({"next": True})
        except WorkerGone as error:
            self.crashed = True
            reason = self._reason()
            if reason == "SIGKILL" and not self._ended:
                raise WorkerKilled("the system killed the decoder, perhaps to free memory") from error
            raise WorkerCrashed(f"the decoder crashed while it read the file ({reason})") from error
        except TooSlow as error:
            raise WorkerFailed(f"decoding the file takes longer than {seconds:g} s") from error
        finally:
            if done:
                self.answered += 1
                if "error" in answer or memory.size > KEPT_BYTES:
                    self._drop_memory()
            else:
                self.end()

    def kill(self) -> None:
        """Kill the process; the thread that uses it notices. Thread-safe."""
        self._ended = True
        with suppress(OSError):
            self._process.kill()

    def end(self) -> None:
        """Kill the process and close what is shared with it. Ending it twice is not an error."""
        self._channel.close()
        self.kill()
        self._process.wait()
        self._drop_memory()

    def _send_question(self, question: Message, data: bytes) -> SharedMemory:
        """Put the file into shared memory, larger if need be, and send the question.

        Raises WorkerGone, WorkerNotStarted.
        """
        needed = len(data) + question["room"]
        memory = self._memory
        if memory is None or memory.size < needed:
            self._drop_memory()
            size = max(1 << 22, 1 << (needed - 1).bit_length())
            try:
                memory = self._memory = SharedMemory(size if size <= KEPT_BYTES else needed)
            except OSError as error:
                raise WorkerNotStarted(f"there is no memory to share with it: {error.strerror}") from error
            question["memory"] = memory.size
        for at in range(0, len(data), PIECE):  # one large copy would stop all other threads
            piece = data[at : at + PIECE]
            memory.bytes[at : at + len(piece)] = piece
        self._channel.send({**question, "size": len(data)}, [memory.fd] if "memory" in question else ())
        return memory

    def _drop_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _reason(self) -> str:
        """The signal or status with which the process ended, in words."""
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "its answer cannot be read"
        if status >= 0:
            return f"exit status {status}"
        return signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"


def _start(kind: WorkerKind) -> tuple[Channel, subprocess.Popen[bytes]]:
    """Start a process, and return it with the connection to it. Raises OSError."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fovea.media.sandbox.worker", str(theirs.fileno()), kind],
                env={"PYTHONPATH": os.pathsep.join(sys.path), **_ENVIRONMENT},
                cwd="/",
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for the server, which ends its workers
            )
    except BaseException:
        ours.close()
        raise
    return Channel(ours), process


def _copy_of(memory: SharedMemory, begin: int, end: int) -> Rgb:
    """Return a copy of a part of the memory. numpy lets other threads run while it copies."""
    if end - begin <= PIECE:
        return memory.bytes[begin:end]
    copy = np.empty(end - begin, np.uint8)
    np.copyto(copy, np.frombuffer(memory.bytes, np.uint8)[begin:end])
    return copy.data
