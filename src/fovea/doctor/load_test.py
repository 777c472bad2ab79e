"""The search for a server's saturation, and three levels of load up to it.

A closed loop with 1, 2, 4, ... clients finds the most requests per second. The knee is the smallest number of
clients that reaches 90% of them: beyond it, more clients wait longer and get no more answers. Then requests
arrive at 10, 50 and 100% of that rate, whatever the server does (an open loop).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fovea.doctor.server import Server
from fovea.doctor.settings import DoctorSettings

LEVELS = (0.1, 0.5, 1.0)
KNEE_SHARE = 0.9
GAIN = 1.1
"""If twice the clients give less than this many times the answers, the search ends."""
FEWEST, MOST = 3, 500
"""Requests of a level."""


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """The figures of one level of load. Times are in milliseconds, over complete answers.

    requests, failed: numbers of requests, and of those without a complete answer.
    refused: requests that were refused with 429 or 503; they count as failed.
    errors: kinds of failure, with their numbers.
    seconds: from the first request to the last answer. per_second: complete answers per second.
    ttft, end_to_end: (P50, P95, P99).
    missed: service-level targets that were missed, as text; empty without targets.
    """

    requests: int
    failed: int
    refused: int
    errors: Mapping[str, int]
    seconds: float
    per_second: float
    ttft: tuple[float, float, float]
    end_to_end: tuple[float, float, float]
    missed: Sequence[str] = ()

    @property
    def error_rate(self) -> float:
        """Share of the requests without a complete answer."""
        return self.failed / self.requests if self.requests else 0.0


Closed = Callable[[Server, int, int], LoadFigures]
"""Sends requests in a closed loop: (server, clients, requests)."""
Open = Callable[[Server, float, int], LoadFigures]
"""Sends requests at random times: (server, requests per second, requests)."""


@dataclass(frozen=True, slots=True)
class Saturation:
    """The result of the search.

    steps: (clients, figures), in the order of the search.
    knee: index of the knee among the steps.
    found: whether the throughput had stopped growing when the search ended.
    """

    steps: Sequence[tuple[int, LoadFigures]]
    knee: int
    found: bool

    @property
    def best(self) -> float:
        """Most complete answers per second of all steps."""
        return max(figures.per_second for _, figures in self.steps)


@dataclass(slots=True)
class LoadTest:
    """A load test of one server. Its results are kept, because several checks read them.

    closed, open: send the load. settings: its length. judged: whether there are service-level targets.
    """

    closed: Closed
    open: Open
    settings: DoctorSettings
    judged: bool = False
    _saturation: Saturation | None = field(default=None, init=False)
    _levels: list[tuple[float, LoadFigures]] | None = field(default=None, init=False)

    def saturation(self, server: Server) -> Saturation:
        """Search for the saturation, once."""
        if self._saturation is None:
            self._saturation = self._search(server)
        return self._saturation

    def levels(self, server: Server) -> list[tuple[float, LoadFigures]]:
        """Send 10, 50 and 100% of the saturation's rate, once. Returns (share, figures) of each level."""
        if self._levels is None:
            best = self.saturation(server).best
            self._levels = [(share, self._level(server, share * best)) for share in LEVELS] if best else []
        return self._levels

    def _level(self, server: Server, rate: float) -> LoadFigures:
        return self.open(server, rate, _count(rate * self.settings.load_seconds))

    def _search(self, server: Server) -> Saturation:
        steps = [(1, self.closed(server, 1, FEWEST))]
        clients = 2
        while clients <= self.settings.max_clients and not _at_its_end(steps):
            expected = steps[-1][1].per_second * self.settings.load_seconds
            steps.append((clients, self.closed(server, clients, max(2 * clients, _count(expected)))))
            clients *= 2
        best = max(figures.per_second for _, figures in steps)
        knee = next(i for i, (_, figures) in enumerate(steps) if figures.per_second >= KNEE_SHARE * best)
        return Saturation(steps, knee, _at_its_end(steps))


def _at_its_end(steps: Sequence[tuple[int, LoadFigures]]) -> bool:
    """Tell whether the last doubling of the clients gave no more answers, or requests fail."""
    if steps[-1][1].failed:
        return True
    return len(steps) > 1 and steps[-1][1].per_second < GAIN * steps[-2][1].per_second


def _count(requests: float) -> int:
    return int(min(MOST, max(FEWEST, requests)))
