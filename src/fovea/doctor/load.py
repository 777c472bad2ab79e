"""Load for a server: streams that run at the same time, a crowd, and the search for the server's saturation.

A closed loop with 1, 2, 4, ... clients finds the most requests per second. The knee is the smallest number of
clients that reaches 90% of them: beyond it, more clients wait longer and get no more answers. Then requests
arrive at 10, 50 and 100% of that rate, whatever the server does (an open loop).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from fovea.core.errors import FoveaError
from fovea.core.settings import check_settings, setting
from fovea.doctor.pictures import data_url, png
from fovea.doctor.server import Answer, NoAnswer, Server, usage


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """How long and how hard the checks of load try, and how large a typical request is.

    No name is that of a setting of a server, because both are read from the same environment.
    """

    load_seconds: float = setting(
        4.0, "Seconds of each level of load; longer levels give steadier percentiles.", low=0.1, high=3600
    )
    max_clients: int = setting(64, "Most clients in the search for the saturation.", low=1, high=4096)
    start_timeout: float = setting(
        600.0, "Seconds that a server which doctor starts has until it is ready.", low=1, high=86400
    )

    image_tokens: int = setting(256, "Visual tokens of the image of a typical request.", low=1, high=10**6)
    token_side: int = setting(
        28,
        "Side of a visual token in pixels: 28 for Qwen2-VL and Qwen2.5-VL, 32 for Qwen3-VL.",
        low=1,
        high=256,
    )
    prompt_tokens: int = setting(56, "Text tokens of a typical request.", low=1, high=10**6)
    output_tokens: int = setting(64, "Tokens of a typical answer.", low=2, high=10**6)

    def __post_init__(self) -> None:
        check_settings(self)


CLIENTS = 4
LONG_TOKENS = 96
"""Tokens of an answer that is still running when its server is ended."""
IN_TIME_S = 30.0
"""Seconds without any data after which a request is given up, where an answer must not take long."""
CROWD_S = 600.0
"""Seconds that the requests of a crowd have."""


@dataclass(slots=True)
class Streams:
    """Streams that run in threads.

    server: gets them. answers: how they ended, in the order of their ends.
    started: released once by each stream whose answer has begun, or that has ended.
    """

    server: Server
    answers: list[Answer | NoAnswer] = field(default_factory=list)
    started: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _threads: list[threading.Thread] = field(default_factory=list)

    def begin(self) -> bool:
        """Start CLIENTS streams. Returns whether all answers have begun."""
        for number in range(CLIENTS):
            thread = threading.Thread(target=self._ask, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()
        return all(self.started.acquire(timeout=IN_TIME_S) for _ in range(CLIENTS))

    def end(self) -> list[Answer | NoAnswer]:
        """Wait for all streams, and return how they ended."""
        for thread in self._threads:
            thread.join()
        return self.answers

    def _ask(self, number: int) -> None:
        begun = False

        def on_data() -> None:
            nonlocal begun
            if not begun:
                begun = True
                self.started.release()

        try:
            answer: Answer | NoAnswer = self.server.ask(
                f"Count up from {number}, and do not stop.",
                [data_url(png(224, 224, (number, 120, 60)))] if self.server.takes_images else [],
                stream=True, max_tokens=LONG_TOKENS, ignore_eos=True, on_data=on_data, patience=IN_TIME_S,
            )  # fmt: skip
        except NoAnswer as error:
            answer = error
        except FoveaError as error:
            answer = NoAnswer(error.message)
        self.answers.append(answer)
        on_data()


def tokens_per_word(server: Server) -> float:
    """Return how many tokens this server's tokenizer makes of a short word, measured by two questions."""
    few, many = (
        int(usage(server.ask("word" + " word" * count, max_tokens=1)).get("prompt_tokens") or 0)
        for count in (1, 41)
    )
    return max(1.0, (many - few) / 40)


def ask_together(server: Server, texts: Sequence[str]) -> list[Answer | NoAnswer]:
    """Ask all texts at the same time, and return how they ended."""

    def ask(text: str) -> Answer | NoAnswer:
        try:
            return server.ask(text, patience=CROWD_S)
        except NoAnswer as error:
            return error

    server.card()
    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(ask, texts))


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
