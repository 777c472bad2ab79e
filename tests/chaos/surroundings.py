"""The parts of the machine that faults need: a network of its own, small disks, a memory group, a clock.

The whole day runs in network and mount namespaces of its own, so that the media host can have a public
address that leads nowhere else, and mounts vanish with the run. All of this needs root on Linux. Whatever is
not permitted is left out, and the report says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PUBLIC = "203.0.114.1"
"""A global address that the run gives to its own loopback interface."""
INSIDE = "FOVEA_CHAOS_INSIDE"
GROUPS = Path("/sys/fs/cgroup/memory")
OOM_MARGIN = 24 << 20
BALLOON = """
import sys, time
open("/proc/self/oom_score_adj", "w").write("-1000")
open(sys.argv[1], "w").write("0")
data = bytearray(b"x") * int(sys.argv[2])
time.sleep(60)
"""


def enter(arguments: list[str]) -> None:
    """Run this program again in namespaces of its own, if that is permitted; otherwise return."""
    if os.environ.get(INSIDE) or os.geteuid() != 0 or shutil.which("unshare") is None:
        return
    unshare = [
        "unshare",
        "--net",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "--propagation",
        "private",
    ]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode == 0:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", [*unshare, sys.executable, "-m", "tests.chaos.run", *arguments])


def own_network() -> bool:
    """Give the loopback interface a public address. Returns whether the run has a network of its own."""
    if not os.environ.get(INSIDE) or shutil.which("ip") is None:
        return False
    commands = (["ip", "link", "set", "lo", "up"], ["ip", "address", "add", f"{PUBLIC}/32", "dev", "lo"])
    return all(subprocess.run(command, capture_output=True).returncode == 0 for command in commands)


class SmallDisk:
    """A folder on a file system of its own, of a few MiB. mounted: whether that was permitted."""

    def __init__(self, folder: Path, mib: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        options = f"size={mib}m,mode=0755"
        self.mounted = bool(os.environ.get(INSIDE)) and _run(
            "mount", "-t", "tmpfs", "-o", options, "tmpfs", folder
        )

    def fill(self) -> None:
        """Write until there is no room."""
        with (self.folder / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            for size in (1 << 20, 4096, 1):
                _fill(file.fileno(), size)

    def clear(self) -> None:
        """Remove the filler."""
        (self.folder / "filler").unlink(missing_ok=True)

    def read_only(self, on: bool) -> bool:
        """Switch writing off or on. Returns whether it worked; it fails while a file is open for writing."""
        return _run("mount", "-o", "remount,ro" if on else "remount,rw", self.folder)

    def unmount(self) -> None:
        if self.mounted:
            _run("umount", "--lazy", self.folder)


class MemoryGroup:
    """A memory group of version 1. Its processes are killed by the kernel when their memory is over a limit.

    permitted: whether groups can be made.
    """

    def __init__(self, name: str) -> None:
        self._folder = GROUPS / name
        self._procs = self._folder / "cgroup.procs"
        self.permitted = False
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)  # a run that was killed has left it
            self.permitted = True

    def exhaust(self, members: Sequence[int]) -> subprocess.Popen[bytes] | None:
        """Put processes into the group, leave it little room, and start a process in it that takes more.

        The kernel kills the largest process of the group, which is the engine: the new one is exempt.
        Returns the new process; None: the limit was not accepted.
        """
        for pid in members:
            self._procs.write_text(str(pid))
        used = int((self._folder / "memory.usage_in_bytes").read_text())
        try:
            (self._folder / "memory.limit_in_bytes").write_text(str(used + OOM_MARGIN))
        except OSError:
            return None
        command = [sys.executable, "-c", BALLOON, str(self._procs), str(3 * OOM_MARGIN)]
        return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command])

    def relax(self) -> None:
        """Remove the limit."""
        (self._folder / "memory.limit_in_bytes").write_text("-1")

    @property
    def kills(self) -> int:
        """Processes that the kernel has killed for memory."""
        with contextlib.suppress(OSError):
            for line in (self._folder / "memory.oom_control").read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._folder.rmdir()


class Clock:
    """The wall clock of some programs, which can be set. library: what they preload; None: no compiler."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self._file.write_bytes(struct.pack("q", 0))
        self.library: Path | None = folder / "clock.so"
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        source = Path(__file__).with_name("clock.c")
        if compiler is None or not _run(
            compiler, "-O2", "-shared", "-fPIC", "-o", self.library, source, "-ldl"
        ):
            self.library = None

    @property
    def env(self) -> dict[str, str]:
        """Variables of a program that has this clock."""
        if self.library is None:
            return {}
        return {"LD_PRELOAD": str(self.library), "FOVEA_CHAOS_CLOCK": str(self._file)}

    def add(self, seconds: int) -> None:
        """Set the clock to so many seconds after the right time, at once."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", seconds))


def _fill(file: int, size: int) -> None:
    try:
        while True:
            os.write(file, b"\0" * size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def _run(*command: str | Path) -> bool:
    return subprocess.run([str(part) for part in command], capture_output=True).returncode == 0
