"""Ends what a local Ray leaves behind when the process that has started it is killed.

Ray's own processes end by themselves, and engines with their replicas. HAProxy is a child of one of Ray's
processes, and outlives it if that one is killed at a bad moment. So `fovea cluster up` starts a guard: a
process that waits for the end of its standard input, which is the end of `up`, and then kills every process
that has inherited the mark of this run in its environment.

This module does not import ray.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "FOVEA_CLUSTER_RUN"
GRACE_S = 2.0
"""Seconds that processes have to end by themselves."""
SWEEP_S = 30.0
"""Seconds for which new processes may still appear."""
POLL_S = 0.5


def start_guard() -> subprocess.Popen[bytes]:
    """Mark this process and all its later children, and start their guard."""
    os.environ[MARK] = mark = secrets.token_hex(8)
    return subprocess.Popen(
        [sys.executable, "-m", __name__, mark],
        stdin=subprocess.PIPE,  # nobody writes: it ends with this process
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != MARK},
    )


def marked(mark: str) -> list[int]:
    """Return the processes with a mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def main(mark: str) -> None:
    """Wait for the end of the input, and then end the marked processes."""
    sys.stdin.buffer.read()
    time.sleep(GRACE_S)
    over = time.monotonic() + SWEEP_S
    while (left := marked(mark)) and time.monotonic() < over:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1])
