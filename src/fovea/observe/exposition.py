"""Parts of a Prometheus registry that server and gateway share.

`expose` writes a scrape: plain text by default, OpenMetrics for scrapers that prefer it, as Prometheus does.
Only OpenMetrics can hold exemplars: the trace id of a request whose time fell into a bucket. `BoundedSeries`
bounds the label values of a metric. `ProcessMetrics` reads CPU time, memory and descriptors of this program's
processes; the names `process_*` are those that all clients of Prometheus use.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from fovea.core.hardware import cgroup_folders

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
VERSIONS = ("", "1.0.0", "0.0.1")
"""Versions of OpenMetrics that a scraper may ask for. They differ in nothing that is written here."""


class Exposition(NamedTuple):
    """The text of a scrape, and its type for the header Content-Type."""

    body: bytes
    media_type: str


def expose(registry: Collector, accept: str = "") -> Exposition:
    """Return the metrics of a registry. accept: the request's Accept header; "": the plain text format."""
    if prefers_openmetrics(accept):
        # prometheus_client's default would write the colons of the names as underscores.
        return Exposition(generate_openmetrics(registry, escaping=ALLOWUTF8), OPENMETRICS)  # type: ignore[no-untyped-call]
    return Exposition(generate_latest(registry), PLAIN)


def prefers_openmetrics(accept: str) -> bool:
    """Whether an Accept header names OpenMetrics, and not text/plain with a higher weight."""
    open_weight = plain_weight = 0.0
    for item in accept.split(","):
        media_type, *pairs = (part.strip() for part in item.split(";"))
        fields = dict(pair.partition("=")[::2] for pair in pairs)
        weight = _weight(fields.get("q", "1"))
        if media_type == "text/plain":
            plain_weight = max(plain_weight, weight)
        elif media_type == "application/openmetrics-text" and fields.get("version", "") in VERSIONS:
            open_weight = max(open_weight, weight)
    return open_weight > 0 and open_weight >= plain_weight


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        return 0.0
    return weight if 0 <= weight <= 1 else 0.0


OTHER = "other"
Parent = TypeVar("Parent", bound=MetricWrapperBase)


class BoundedSeries(Generic[Parent]):
    """The series of a counter or a histogram (`parent`), by the values of their labels."""

    def __init__(self, parent: Parent, labels: int, most: int) -> None:
        """Take the metric whose series these are.

        labels: number of its labels; 0: the metric is its only series.
        most: most series with label values of their own.
        """
        self.parent = parent
        self._most = most
        self._children: dict[tuple[str, ...], Parent] = {} if labels else {(): parent}

    def __getitem__(self, values: tuple[str, ...]) -> Parent:
        """Return the series with these label values, or the one for others if there are too many."""
        child = self._children.get(values)
        return self._new(values) if child is None else child

    def _new(self, values: tuple[str, ...]) -> Parent:
        if len(self._children) >= self._most:
            values = (OTHER,) * len(values)
        child = self._children[values] = self.parent.labels(*values)
        return child


PROCESS = {
    "process_virtual_memory_bytes": ("gauge", "address space of the process"),
    "process_resident_memory_bytes": ("gauge", "memory of the process that is in RAM"),
    "process_start_time_seconds": ("gauge", "Unix time at which the process began"),
    "process_cpu_seconds": ("counter", "CPU time of the process, in user mode and in the kernel"),
    "process_open_fds": ("gauge", "open descriptors of the process"),
    "process_max_fds": ("gauge", "most file descriptors that the process may open"),
}
CGROUP = {
    "cgroup_memory_usage_bytes": "memory of all processes in this cgroup, file caches included",
    "cgroup_memory_limit_bytes": "memory limit of all processes in this cgroup; +Inf: there is no limit",
}
_FILES = (("memory.current", "memory.max"), ("memory.usage_in_bytes", "memory.limit_in_bytes"))
_NO_LIMIT = 2**60
"""Version 1 of cgroups writes a number above this if there is no limit."""


def own_process() -> Iterator[int]:
    """Yield this process's id."""
    yield os.getpid()


def workers(folder: Path) -> Iterator[int]:
    """Yield the ids of the living processes that keep metrics in a folder, as prometheus_client does."""
    names = {path.stem.rpartition("_")[2] for path in folder.glob("*.db")}
    yield from sorted(int(name) for name in names if name.isdigit() and Path("/proc", name).is_dir())


class ProcessMetrics(Collector):
    """The sums over all processes of a program; of the time of their start, the earliest one.

    processes: yields their ids.
    folders: where to look for the cgroup's files.
    """

    def __init__(
        self,
        processes: Callable[[], Iterable[int]] = own_process,
        folders: Callable[[], Sequence[Path]] = lambda: cgroup_folders("memory"),
    ) -> None:
        self._processes = processes
        self._folders = folders

    def collect(self) -> Iterator[Metric]:
        figures: dict[str, list[float]] = {}
        for process in self._processes():
            for family in ProcessCollector(pid=lambda process=process: process, registry=None).collect():  # type: ignore[misc]
                figures.setdefault(family.name, []).append(family.samples[0].value)
        for name, (kind, text) in PROCESS.items():
            if name in figures:
                value = min(figures[name]) if name == "process_start_time_seconds" else sum(figures[name])
                family = Metric(name, text, kind)
                family.add_sample(name + ("_total" if kind == "counter" else ""), {}, value)
                yield family
        memory = cgroup_memory(self._folders())
        for (name, text), value in zip(CGROUP.items(), memory or (), strict=False):
            yield GaugeMetricFamily(name, text, value=value)


def cgroup_memory(folders: Sequence[Path]) -> tuple[float, float] | None:
    """Return the used bytes of the deepest folder that tells them, and the lowest limit of all folders.

    None: no folder tells the used bytes.
    """
    used: float | None = None
    limit = math.inf
    for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
        for usage_file, limit_file in _FILES:
            usage = _number(folder / usage_file)
            used = usage if used is None else used
            limit = min(limit, _number(folder / limit_file) or math.inf)
    return None if used is None else (used, math.inf if limit > _NO_LIMIT else limit)


def _number(path: Path) -> float | None:
    """The number that a file holds; None: there is none, as "max" is none."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None
