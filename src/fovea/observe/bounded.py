"""The series of one metric, bounded in number: beyond a limit, further label values become "other"."""

from __future__ import annotations

from typing import Generic, TypeVar

from prometheus_client.metrics import MetricWrapperBase

OTHER = "other"
Parent = TypeVar("Parent", bound=MetricWrapperBase)


class BoundedSeries(Generic[Parent]):
    """The series of a counter or a histogram, by the values of their labels."""

    def __init__(self, parent: Parent, labels: int, most: int) -> None:
        """Take the metric whose series these are.

        labels: number of its labels; 0: the metric is its only series.
        most: most series with label values of their own.
        """
        self._parent = parent
        self._most = most
        self._children: dict[tuple[str, ...], Parent] = {} if labels else {(): parent}

    def __getitem__(self, values: tuple[str, ...]) -> Parent:
        """Return the series with these label values, or the one for others if there are too many."""
        child = self._children.get(values)
        return self._new(values) if child is None else child

    def _new(self, values: tuple[str, ...]) -> Parent:
        if len(self._children) >= self._most:
            values = (OTHER,) * len(values)
        child = self._children[values] = self._parent.labels(*values)
        return child
