"""The seam to this machine: files of /proc and /sys, disks, programs and addresses."""

from __future__ import annotations

import ipaddress
import os
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fovea.core.hardware import available_memory, cgroup_folders, usable_cores

PROGRAM_S = 20.0
"""Seconds that a program may take."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk of a folder, or of its nearest parent that exists.

    free: bytes that this user may still write. kind: of the file system, such as ext4; empty if unknown.
    writable: whether a file could be created.
    """

    free: int
    kind: str
    writable: bool


class Machine(Protocol):
    """Reads what checks want to know about the machine."""

    def text(self, path: str) -> str | None:
        """Return the text of a file; None: it does not exist or cannot be read."""
        ...

    def mode(self, path: str) -> int | None:
        """Return the permission bits of a file; None: it does not exist."""
        ...

    def disk(self, folder: str) -> Disk:
        """Return the disk of a folder. Raises OSError."""
        ...

    def output(self, command: Sequence[str]) -> str | None:
        """Return the output of a program; None: it is not installed, failed, or took too long."""
        ...

    def cores(self) -> int:
        """Return how many cores threads should use, by affinity and cgroup."""
        ...

    def free_memory(self) -> int:
        """Return the bytes that can be allocated without swapping."""
        ...

    def open_files(self) -> int:
        """Return how many files a process may open; -1: no limit."""
        ...

    def cgroup(self, controller: str) -> list[str]:
        """Return the folders that may hold limits of this process. controller: cpu or memory."""
        ...

    def addresses(self) -> list[str]:
        """Return the addresses of this machine that are not loopback ones."""
        ...

    def connects(self, address: str, port: int) -> bool:
        """Tell whether a TCP connection to an address succeeds."""
        ...


class ThisMachine:
    """The machine on which this process runs."""

    def text(self, path: str) -> str | None:
        """Return the text of a file."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def mode(self, path: str) -> int | None:
        """Return the permission bits of a file."""
        try:
            return Path(path).stat().st_mode & 0o777
        except OSError:
            return None

    def disk(self, folder: str) -> Disk:
        """Return the disk of a folder."""
        path = Path(folder).expanduser().absolute()
        while not path.exists():
            path = path.parent
        try:
            with tempfile.TemporaryFile(dir=path):
                writable = True
        except OSError:
            writable = False
        return Disk(shutil.disk_usage(path).free, _kind(self.text("/proc/mounts") or "", path), writable)

    def output(self, command: Sequence[str]) -> str | None:
        """Return the output of a program."""
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PROGRAM_S, check=True, errors="replace"
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout

    def cores(self) -> int:
        """Return how many cores threads should use."""
        return len(usable_cores())

    def free_memory(self) -> int:
        """Return the bytes that can be allocated."""
        return available_memory()

    def open_files(self) -> int:
        """Return how many files a process may open."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return -1 if limit == resource.RLIM_INFINITY else limit

    def cgroup(self, controller: str) -> list[str]:
        """Return the folders of limits."""
        return [str(folder) for folder in cgroup_folders(controller)]

    def addresses(self) -> list[str]:
        """Return the addresses of this machine, by its name and by the way to other networks."""
        found = set()
        try:
            for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
                found.add(str(entry[4][0]))
        except OSError:
            found.clear()
        # Connecting a UDP socket sends nothing. It only chooses the address that packets would leave from.
        for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect((far, 9))
                    found.add(str(probe.getsockname()[0]))
            except OSError:
                continue
        return sorted(address for address in found if not is_loopback(address))

    def connects(self, address: str, port: int) -> bool:
        """Tell whether a connection succeeds."""
        try:
            with socket.create_connection((address, port), timeout=2.0):
                return True
        except OSError:
            return False


def is_loopback(host: str) -> bool:
    """Tell whether a host is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _kind(mounts: str, path: Path) -> str:
    """Return the kind of the file system that holds a path, by /proc/mounts: its longest mount point."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = path == Path(point) or Path(point) in path.parents
        if inside and len(point) > best:
            best, kind = len(point), fields[2]
    return kind


def cache_home() -> str:
    """Return the folder in which compiled kernels are kept."""
    return os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
