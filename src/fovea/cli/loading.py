"""Shows how far the weights of a model are: as a bar in a terminal, or as lines of the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fovea.core.progress import MIB, Loaded, watch

if TYPE_CHECKING:
    from rich.progress import Progress

LEAST_BYTES = 64 * MIB
"""Smaller models are loaded before anyone could read a bar."""
LINE_S = 10.0
"""Seconds between two lines of the log."""


class Bar:
    """A bar with MiB, speed and remaining time. It vanishes when all weights are loaded."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def __call__(self, loaded: Loaded) -> None:
        if loaded.total < LEAST_BYTES:
            return
        if self._progress is None:
            self._progress = _progress()
            self._progress.add_task("weights", total=loaded.total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=loaded.done, total=loaded.total)
        if loaded.percent == 100:
            self.close()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class Lines:
    """A line of the log every LINE_S seconds. clock: seconds."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock, self._next = log, clock, clock() + LINE_S

    def __call__(self, loaded: Loaded) -> None:
        if self._clock() >= self._next:
            self._next = self._clock() + LINE_S
            self._log.info("the model is still loading: %s", loaded)

    def close(self) -> None:
        pass


@contextmanager
def loading_shown(log: logging.Logger | None = None) -> Iterator[None]:
    """Show the loading of a model on stderr while the context lasts.

    log: for lines where stderr is no terminal; None: nothing is shown there.
    """
    shown = Bar() if sys.stderr.isatty() else Lines(log) if log is not None else None
    if shown is None:
        yield
        return
    try:
        with watch(shown):
            yield
    finally:  # after the last report: another one would begin a new bar
        shown.close()


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    return Progress("{task.description}", *columns, console=Console(stderr=True), transient=True)
