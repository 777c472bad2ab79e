"""Live progress of `fovea bench`."""

from __future__ import annotations

import sys

from fovea.bench.sample import Sample


class BenchProgress:
    """A progress bar on stderr, if stderr is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
        )
        # The bar is drawn rarely, because drawing disturbs the time measurements of this process.
        self._bars = Progress(
            *columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), refresh_per_second=4
        )
        self._task = self._bars.add_task("connecting", total=None, status="")
        self._tokens = self._failed = 0

    def __enter__(self) -> BenchProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, name: str, total: int) -> None:
        self._tokens = self._failed = 0
        self._bars.reset(self._task, description=name, total=total or None, status="")

    def advance(self, sample: Sample) -> None:
        self._tokens += sample.output_tokens
        self._failed += not sample.succeeded
        self._bars.update(self._task, advance=1, status=f"{self._tokens} tokens, {self._failed} failed")
