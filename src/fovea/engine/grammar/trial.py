"""Compiles each form in a separate process first, with limits on time and memory.

The library has limits of its own, but some regular expressions go beyond them and take minutes. A thread
cannot be stopped, a process can. So a form is compiled in the engine only after it was compiled here.

    engine            helper                         attempt
    check(form) --->  reads a line, forks  --------> compiles, within CPU_S seconds and MEMORY bytes
                <---  sends the result  <----------- the result, or nothing if it was killed

The helper has a vocabulary of single bytes: what a compilation costs hardly depends on the vocabulary.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any

from fovea.core.constraints import AnswerFormat
from fovea.core.errors import InvalidRequest, Unavailable
from fovea.engine.grammar.definition import compile_format, explain_error
from fovea.engine.grammar.vocabulary import PlainTokens
from fovea.media.sandbox.jail import limit_resources

CPU_S = 0.2
"""Most processor time of an attempt in seconds. It does not count while other processes run."""
MEMORY = 512 * 1024 * 1024
"""Most memory of an attempt beyond that of the helper, in bytes."""
ANSWER_S = 10.0
"""Longest time until the helper answers. Beyond it, the helper is restarted."""
END = 256


class Trial:
    """The helper process, seen from the engine. For one thread. It is started on first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, form: AnswerFormat) -> None:
        """Compile a form in a process of its own.

        Raises InvalidRequest if it is not supported or costs too much, Unavailable if no process can be
        started.
        """
        line = json.dumps(asdict(form)).encode() + b"\n"
        try:
            try:
                answer = self._ask(line)
            except EOFError:
                answer = self._ask(line)  # the helper had ended, for whatever reason
        except (OSError, EOFError) as error:
            self.close()
            raise Unavailable(f"answer formats cannot be checked: {error}", scope="request") from error
        if answer is None:
            raise InvalidRequest(
                f"{form.kind}: it takes more than {CPU_S:g} seconds or {MEMORY >> 20} MiB to compile",
                code="unsupported_format",
            )
        if "error" in answer:
            raise InvalidRequest(answer["error"], code="unsupported_format")

    def close(self) -> None:
        """Stop the helper. A later check starts another."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # an attempt may be at work, too
            process.communicate()

    def _ask(self, job: bytes) -> dict[str, str] | None:
        """Return the helper's answer; None: the attempt was killed.

        Raises EOFError if the helper ended, or did not answer in time.
        """
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fovea.engine.grammar.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PYTHONPATH": os.pathsep.join(sys.path), "RAYON_NUM_THREADS": "1"},
                cwd="/",  # whose modules are imported, so not the folder in which the server was started
                start_new_session=True,  # Ctrl-C in a terminal is for the server
            )
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None
        assert sink is not None
        sink.write(job)
        sink.flush()
        answered = select.poll()  # select.select takes no descriptors from 1024 on
        answered.register(source, select.POLLIN)
        line = source.readline() if answered.poll(1000 * ANSWER_S) else b""
        if not line:
            self.close()
            raise EOFError("the process that tries them does not answer")
        answer: dict[str, str] | None = json.loads(line)
        return answer


def serve(source: IO[bytes], sink: IO[bytes]) -> None:
    """Answer each line of `source` with a line: {} for a form that compiles, its error, or null."""
    vocabulary = byte_vocabulary()
    for line in source:
        form = AnswerFormat(**json.loads(line))
        sink.write((attempt(form, vocabulary) or b"null") + b"\n")
        sink.flush()


def byte_vocabulary() -> Any:
    """A vocabulary of the 256 bytes and an end token."""
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = [*(bytes([byte]) for byte in range(END)), b"<end>"]
    return LLTokenizer(TokenizerWrapper(PlainTokens(tokens, END)), eos_token=END)


def attempt(form: AnswerFormat, vocabulary: Any) -> bytes:
    """Compile in a fork of this process. Returns the line of the result, empty if it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _limit()
        result: dict[str, str] = {}
        try:
            matcher = compile_format(form, vocabulary)
            matcher.compute_bitmask()
            if matcher.is_error():
                result = {"error": f"{form.kind}: {explain_error(matcher.get_error(), form.kind)}"}
        except InvalidRequest as error:
            result = {"error": error.message}
        except MemoryError:
            os._exit(1)
        except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
            result = {"error": f"{form.kind}: it cannot be read: {str(error)[:200]}"}
        os.write(writer, json.dumps(result).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        line = pipe.read()
    os.waitpid(child, 0)
    return line


def _limit() -> None:
    """Let the system end this process when it has used too much time, and refuse it too much memory."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # SIGPROF ends a process
    signal.alarm(int(ANSWER_S) // 2)  # if it only waits
    with suppress(OSError):  # on macOS
        limit_resources(MEMORY)


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
