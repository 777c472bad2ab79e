"""Clocks of training: work instead of time, and courtesy to other programs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch


class Courtesy:
    """Uses one thread less while other programs need the cores, because one late thread delays all others."""

    def __init__(self, threads: int) -> None:
        self.threads = self.now = threads
        self.mark = self.read()

    @staticmethod
    def read() -> tuple[float, float, float]:
        """Seconds of the clock, of work of all cores, and of work of this process."""
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:8]]
        busy = sum(fields) - fields[3] - fields[4]
        return time.time(), busy / os.sysconf("SC_CLK_TCK"), time.process_time()

    def adapt(self) -> None:
        """Set the number of threads by the load of the last 12 seconds or more; do nothing before that."""
        at, busy, own = self.read()
        elapsed = at - self.mark[0]
        if elapsed < 12:
            return
        others = (busy - self.mark[1] - own + self.mark[2]) / elapsed
        self.mark = at, busy, own
        free = (os.cpu_count() or 1) - others
        threads = self.threads if free > self.threads - 0.25 else max(2, self.threads - 1)
        if threads != self.now:
            self.now = threads
            torch.set_num_threads(threads)


class WorkClock:
    """Counts seconds of work since the start.

    On a CPU it is the process's CPU time divided by its threads, so that pauses and other programs do not
    count. On a GPU it is wall-clock time.
    """

    def __init__(self, threads: int, device: torch.device) -> None:
        self.threads = threads if device.type == "cpu" else 1
        self.read = time.process_time if device.type == "cpu" else time.monotonic
        self.start = self.read()

    @property
    def seconds(self) -> float:
        return (self.read() - self.start) / self.threads
