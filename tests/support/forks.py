"""Starts commands quickly: one process imports torch and Fovea once, and forks for every command.

A fork is a process of its own, with its own streams, signals and exit status. It skips what takes two
seconds each time: importing. How a process starts before that is tested with real processes.

Its end waits for threads and calls what is registered with `atexit`, as any other. It skips what follows,
which takes a quarter of a second: the interpreter takes all modules apart, and C++ its own objects. Tests
of the end itself ask for a `whole_end`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""A process with threads must not be forked."""
USED_US: list[int] = []
"""Processor time of each fork that has ended, in microseconds."""


class Fork:
    """A forked process, with what tests need of `subprocess.Popen`.

    Its input is empty, its output is text.
    """

    def __init__(
        self,
        code: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        folder: Path | None = None,
        *,
        whole_end: bool = False,
    ) -> None:
        """code: the Python program to run.

        arguments: sys.argv[1:]. env: the whole environment. folder: it runs there. whole_end: the interpreter
        ends as any other, see above.
        """
        self.args = list(arguments)
        self.returncode: int | None = None
        (out, out_end), (err, err_end), (self._ended, ended_end) = os.pipe(), os.pipe(), os.pipe()
        job = {
            "code": code, "arguments": self.args, "env": dict(env), "folder": str(folder or Path.cwd()),
            "whole_end": whole_end,
        }  # fmt: skip
        request = json.dumps(job).encode()
        ends = [out_end, err_end, ended_end]
        socket.send_fds(_server(), [len(request).to_bytes(8, "little")], ends)
        _server().sendall(request)
        for end in ends:
            os.close(end)
        self.stdout: IO[str] = open(out, encoding="utf-8")  # noqa: SIM115 - closed by communicate
        self.stderr: IO[str] = open(err, encoding="utf-8")  # noqa: SIM115
        self.pid = int.from_bytes(_server().recv(8, socket.MSG_WAITALL), "little")

    def poll(self) -> int | None:
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what the process writes to both streams from now on to its end."""
        streams = (self.stdout, self.stderr)
        written: dict[int, bytes] = {stream.fileno(): b"" for stream in streams if not stream.closed}
        with selectors.DefaultSelector() as selector:
            for number in written:
                selector.register(number, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(timeout)
                if not ready:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    written[key.fd] += data
                    if not data:
                        selector.unregister(key.fd)
        self.wait(timeout)
        out, err = (
            "" if stream.closed else written[stream.fileno()].decode(errors="replace") for stream in streams
        )
        for stream in streams:
            stream.close()
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _status(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._ended, selectors.EVENT_READ)
                if not selector.select(timeout):
                    return None
            self.returncode, used_us = struct.unpack("<qq", os.read(self._ended, 16))
            os.close(self._ended)
            USED_US.append(used_us)
        return self.returncode


def script(path: Path, *arguments: str, **variables: str) -> Fork:
    """Start a script of Python with `variables` added to the environment."""
    code = f"import runpy, sys\nsys.argv[0] = {str(path)!r}\nsys.path.insert(0, {str(path.parent)!r})\n"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    return Fork(code, arguments, os.environ | variables)


_PROCESSES: list[subprocess.Popen[bytes]] = []


@cache
def _server() -> socket.socket:
    """Return the link to the process that forks. That process ends when this one closes the link, or ends."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.forks", str(theirs.fileno())],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | ONE_THREAD,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # it gets no Ctrl-C; it ends when the tests close the link
    )
    _PROCESSES.append(process)
    theirs.close()
    return ours


def stop() -> None:
    """End the process that forks, if there is one."""
    for process in _PROCESSES:
        _server().close()
        process.wait()
    _PROCESSES.clear()


def _import_everything() -> None:
    import uvloop  # noqa: F401
    from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    import fovea.cli.main
    import fovea.engine.engine
    import fovea.server.app
    import fovea.server.run

    fovea.cli.main.build_parser(*fovea.cli.main.COMMANDS)
    gc.collect()
    gc.freeze()  # the end of a fork is quick if it does not look for garbage in everything imported


def _serve(link: socket.socket) -> dict[str, Any]:
    """Fork for every request. Returns only in a fork, with its job; the process itself ends with the link."""
    waker, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        selector.register(waker, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is waker:
                    waker.recv(1024)
                    _tell_who_ended(waiting)
                    continue
                length, ends, _, _ = socket.recv_fds(link, 8, 3)
                if not length:
                    os._exit(0)
                request = link.recv(int.from_bytes(length, "little"), socket.MSG_WAITALL)
                child = os.fork()
                if child == 0:
                    for number, end in zip((1, 2), ends[:2], strict=True):
                        os.dup2(end, number)
                    for end in (*ends, *waiting.values()):
                        os.close(end)
                    break
                waiting[child] = ends[2]
                os.close(ends[0])
                os.close(ends[1])
                link.sendall(child.to_bytes(8, "little"))
            else:
                continue
            break
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for closed in (waker, wake, link):
        closed.close()
    return dict(json.loads(request))


def _tell_who_ended(waiting: dict[int, int]) -> None:
    while waiting:
        child, status, used = os.wait4(-1, os.WNOHANG)
        if not child:
            return
        used_us = int(1e6 * (used.ru_utime + used.ru_stime))
        with contextlib.suppress(OSError):
            os.write(waiting[child], struct.pack("<qq", os.waitstatus_to_exitcode(status), used_us))
        os.close(waiting.pop(child))


def _end(code: int) -> None:
    """End the process, without what the interpreter does after `atexit`. Returns if a stream is broken."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


if __name__ == "__main__":
    _import_everything()
    job = _serve(socket.socket(fileno=int(sys.argv[1])))
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["env"])
    before = sys.stdout, sys.stderr  # keep them: to close them would close descriptors 1 and 2
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["-c", *job["arguments"]]
    status: object = None
    try:
        exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code
    if not job["whole_end"] and (status is None or isinstance(status, int)):
        _end(int(status or 0))
    sys.exit(status)  # type: ignore[arg-type]
