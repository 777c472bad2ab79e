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

from fovea.core.errors import EngineError, InvalidRequest, Overloaded

FORMATS = {
    "flamegraph": "image/svg+xml",
    "speedscope": "application/json",
    "raw": "text/plain; charset=utf-8",
}
"""Format -> media type. speedscope is read by speedscope.app; raw has a line per stack with its samples."""
LONGEST_S = 60.0
EXTRA_S = 30.0
"""Seconds that py-spy may take beside the recording."""
_PR_SET_PTRACER = 0x59616D61


class NotProfiled(EngineError):
    """py-spy is missing, or may not look at this process."""

    status = 501
    default_code = "profiler_unavailable"


@dataclass(frozen=True, slots=True)
class Wish:
    """The profile that is asked for.

    seconds: how long to look. form: one of FORMATS.
    native: functions of C and C++ are shown, too. idle: threads that wait are shown, too.
    """

    seconds: float = 5.0
    form: str = "flamegraph"
    native: bool = False
    idle: bool = False

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Wish:
        """Read the parameters of a request. Raises InvalidRequest."""
        for name in query:
            if name not in ("seconds", "format", "native", "idle"):
                raise InvalidRequest(
                    f"unknown parameter {name[:40]!r}; accepted: seconds, format, native, idle",
                    param=name[:40],
                )
        try:
            seconds = float(query.get("seconds", "5"))
        except ValueError:
            seconds = 0.0
        if not 0.1 <= seconds <= LONGEST_S:
            raise InvalidRequest(
                f"seconds is {query['seconds'][:20]!r}; accepted: 0.1 to {LONGEST_S:g}", param="seconds"
            )
        form = query.get("format", "flamegraph")
        if form not in FORMATS:
            raise InvalidRequest(f"format is {form[:40]!r}; accepted: {', '.join(FORMATS)}", param="format")
        return cls(seconds, form, _flag(query, "native"), _flag(query, "idle"))


class Profiler:
    """Makes one profile at a time."""

    def __init__(self) -> None:
        self._busy = False

    async def profile(self, wish: Wish) -> bytes:
        """Profile this process, and return the profile in the wished format.

        Raises Overloaded while another profile is made, NotProfiled if py-spy cannot do it.
        """
        if self._busy:
            raise Overloaded(
                "another profile is being made; accepted: one at a time", retry_after=5.0, code="profiling"
            )
        self._busy = True
        try:
            with tempfile.TemporaryDirectory(prefix="fovea-profile-") as folder:
                return await _record(wish, Path(folder) / "profile")
        finally:
            self._busy = False


def find_program() -> str:
    """Return the path of py-spy: beside Python, or in PATH. Raises NotProfiled."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("py-spy", path=places)
    if program is None:
        raise NotProfiled(
            "profiles need py-spy, which is not installed; install the extra profiling: "
            "pip install 'fovea[profiling]'"
        )
    return program


async def _record(wish: Wish, output: Path) -> bytes:
    command = [
        find_program(), "record", "--pid", str(os.getpid()), "--output", str(output), "--nonblocking",
        "--format", wish.form, "--duration", str(max(1, round(wish.seconds))), "--threads",
        *(["--native"] if wish.native else []), *(["--idle"] if wish.idle else []),
    ]  # fmt: skip
    # A shell waits for a line before it becomes py-spy, so that this process can allow it to look first.
    process = await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", 'read -r go && exec "$@"', "py-spy", *command,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={"PATH": os.environ.get("PATH", ""), "TERM": "dumb"},
    )  # fmt: skip
    _allow(process.pid)
    try:
        async with asyncio.timeout(wish.seconds + EXTRA_S):
            said, _ = await process.communicate(b"go\n")
    except TimeoutError:
        raise NotProfiled(f"py-spy took longer than {wish.seconds + EXTRA_S:g} seconds") from None
    finally:
        _allow(0)
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode == 0 and output.is_file():
        return await asyncio.to_thread(output.read_bytes)
    lines = said.decode(errors="replace").strip().splitlines()
    raise NotProfiled(
        f"py-spy cannot look at this process: {lines[-1][:200] if lines else 'it said nothing'}; it needs the "
        "right to trace processes (ptrace), which seccomp, capabilities or yama can forbid"
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
