"""Profiles this process with py-spy while it serves: which functions its threads are in.

py-spy looks at the process from outside a hundred times per second. It needs the right to trace it, which
Linux gives to the same user, if the process allows it (prctl) and no stricter rule forbids it: yama's
ptrace_scope 2 or 3, or a container's seccomp profile without ptrace.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fovea.core.errors import EngineError, InvalidRequest, NotFound, Overloaded
from fovea.core.names import install_command

FORMATS = {
    "flamegraph": "image/svg+xml",
    "speedscope": "application/json",
    "raw": "text/plain; charset=utf-8",
}
"""Format -> media type. speedscope is read by speedscope.app; raw has a line per stack with its samples."""
LONGEST_S = 60
"""Longest recording, in seconds."""
EXTRA_S = 30
"""Seconds that py-spy may take beside the recording."""
_PR_SET_PTRACER = 0x59616D61


class ProfilerUnavailable(EngineError):
    """py-spy is missing, or may not look at this process."""

    status = 501
    default_code = "profiler_unavailable"


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Options of a profile.

    seconds: duration of the recording.
    form: one of FORMATS.
    native: whether functions of C and C++ are shown, too.
    idle: whether threads that wait are shown, too.
    """

    seconds: int = 5
    form: str = "flamegraph"
    native: bool = False
    idle: bool = False

    @classmethod
    def of(cls, query: Mapping[str, str]) -> ProfileOptions:
        """Read the parameters of a request. Raises InvalidRequest."""
        for name in query:
            if name not in ("seconds", "format", "native", "idle"):
                raise InvalidRequest(
                    f"unknown parameter {name[:40]!r}; accepted: seconds, format, native, idle",
                    param=name[:40],
                )
        text = query.get("seconds", "5")
        seconds = int(text) if text.isdecimal() and len(text) < 4 else 0
        if not 1 <= seconds <= LONGEST_S:
            raise InvalidRequest(
                f"seconds is {text[:20]!r}; accepted: a whole number from 1 to {LONGEST_S}", param="seconds"
            )
        form = query.get("format", "flamegraph")
        if form not in FORMATS:
            raise InvalidRequest(f"format is {form[:40]!r}; accepted: {', '.join(FORMATS)}", param="format")
        return cls(seconds, form, _flag(query, "native"), _flag(query, "idle"))


class Profiler:
    """Makes one profile at a time."""

    def __init__(self) -> None:
        self._busy = False

    async def profile(self, options: ProfileOptions) -> bytes:
        """Profile this process, and return the profile in the wanted format.

        Raises Overloaded while another profile is made, ProfilerUnavailable if py-spy cannot do it.
        """
        if self._busy:
            raise Overloaded(
                "another profile is being made; accepted: one profile at a time",
                retry_after=5.0,
                code="profiling",
                scope="request",
            )
        self._busy = True
        try:
            with tempfile.TemporaryDirectory(prefix="fovea-profile-") as folder:
                return await _record(options, Path(folder) / "profile")
        finally:
            self._busy = False


def find_program() -> str:
    """Return the path of py-spy: beside Python, or in PATH. Raises ProfilerUnavailable."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("py-spy", path=places)
    if program is None:
        raise ProfilerUnavailable(
            "profiles need py-spy, which is not installed; install the extra profiling: "
            f"{install_command('profiling')}"
        )
    return program


async def _record(options: ProfileOptions, output: Path) -> bytes:
    command = [
        find_program(), "record", "--pid", str(os.getpid()), "--output", str(output), "--nonblocking",
        "--format", options.form, "--duration", str(options.seconds), "--threads",
        *(["--native"] if options.native else []), *(["--idle"] if options.idle else []),
    ]  # fmt: skip
    # A shell waits for a line before it becomes py-spy, so that this process can allow it to look first.
    process = await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", 'read -r go && exec "$@"', "py-spy", *command,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={"PATH": os.environ.get("PATH", ""), "TERM": "dumb"},
    )  # fmt: skip
    _allow(process.pid)
    try:
        async with asyncio.timeout(options.seconds + EXTRA_S):
            output_text, _ = await process.communicate(b"go\n")
    except TimeoutError:
        raise ProfilerUnavailable(f"py-spy took longer than {options.seconds + EXTRA_S} seconds") from None
    finally:
        _allow(0)
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode == 0 and output.is_file():
        return await asyncio.to_thread(output.read_bytes)
    if b"No stack counts found" in output_text:
        raise NotFound(
            f"no thread of the process worked within {options.seconds} seconds; accepted: idle=true, which "
            "also shows threads that wait, or more seconds",
            code="idle_process",
        )
    last_line = (output_text.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
    raise ProfilerUnavailable(
        f"py-spy cannot look at this process: {last_line[:200]}; it needs the right to trace processes "
        "(ptrace), which seccomp, capabilities or yama can forbid"
    )


def _allow(pid: int) -> None:
    """Allow a process to trace this one, where yama's ptrace_scope is 1. 0: none any more."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def _flag(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name} is {value[:20]!r}; accepted: true, false", param=name)
    return value in ("true", "1")
