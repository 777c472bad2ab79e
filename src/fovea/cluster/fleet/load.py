"""The load of a simulated fleet: conversations that begin at random times, drawn one after another.

Nothing of the load depends on how it is served: the same seed gives the same conversations to every fleet.
Only the time of a further question does, because users ask it some time after they have read the answer.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting
from fovea.core.trace import Trace, TraceRequest, geometric
from fovea.engine.simulate.run import Next


class Turn(NamedTuple):
    """One question of a conversation.

    text: tokens of the question. output: tokens of its answer.
    think_s: seconds between the end of the answer before and this question; 0 for the first one.
    """

    text: int
    output: int
    think_s: float


class Conversation(NamedTuple):
    """One conversation.

    at: time of its first question, in seconds.
    key: its name. image: the name of its image; "": it has none.
    visual: tokens of the image.
    turns: its questions, at least one.
    pictures: the image stands for so many equal ones, which are always asked about together.
    """

    at: float
    key: str
    image: str
    visual: int
    turns: tuple[Turn, ...]
    pictures: int = 1


class AnyLoad(Protocol):
    """Conversations that a fleet can serve; `Load` is one.

    seed: of the fleet's disturbances. system_tokens: of the prompt that all requests begin with.
    """

    @property
    def seed(self) -> int: ...

    @property
    def system_tokens(self) -> int: ...

    def conversations(self) -> Iterator[Conversation]:
        """Yield the conversations in order of their first questions."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """Parameters of the load. Raises ConfigError for a value out of range."""

    requests: int = setting(100_000, "Number of requests.", low=1, high=10**8)
    rate: float = setting(100.0, "Mean requests per second, all replicas together.", low=1e-6, high=1e6)
    shape: str = setting(
        "steady",
        "How the rate changes. steady: it does not; daily: a sine with the period of day_s; bursty: times of "
        "burst_factor times the calm rate, at random.",
        choices=("steady", "daily", "bursty"),
    )
    day_s: float = setting(86_400.0, "Seconds of a day, for the shape daily.", low=1, high=1e7)
    swing: float = setting(
        0.7, "Share of the mean rate by which a day rises and falls, for the shape daily.", low=0, high=1
    )
    burst_factor: float = setting(
        3.0, "Rate in a burst, as a multiple of the rate before it, for the shape bursty.", low=1, high=1000
    )
    burst_s: float = setting(60.0, "Mean seconds of a burst, for the shape bursty.", low=0.01, high=1e6)
    calm_s: float = setting(
        300.0, "Mean seconds between two bursts, for the shape bursty.", low=0.01, high=1e6
    )
    text: float = setting(0.3, "Share of conversations without an image.", low=0, high=1)
    images: int = setting(100_000, "Number of distinct images.", low=1, high=10**7)
    zipf: float = setting(
        0.9,
        "Exponent of the images' popularity: the n-th most popular is used n**-zipf times as often as the "
        "first; 0: all equally often.",
        low=0,
        high=10,
    )
    visual_tokens: tuple[int, ...] = setting(
        (256, 576, 1024),
        "Possible visual tokens of an image, each with equal probability.",
        low=1,
        high=10**6,
        nonempty=True,
    )
    turns: float = setting(
        2.0, "Mean questions of a conversation, geometrically distributed.", low=1, high=1000
    )
    think_s: float = setting(20.0, "Mean seconds before a further question.", low=0, high=1e6)
    prompt_tokens: int = setting(
        60, "Mean tokens of a question, geometrically distributed.", low=1, high=10**6
    )
    output_tokens: int = setting(
        150, "Mean tokens of an answer, geometrically distributed.", low=1, high=10**6
    )
    system_tokens: int = setting(200, "Tokens of a system prompt that all requests share.", low=0, high=10**6)
    seed: int = setting(0, "The same seed gives the same load and the same disturbances.", low=0, high=2**31)

    def __post_init__(self) -> None:
        check_settings(self)

    def conversations(self) -> Iterator[Conversation]:
        """Yield the conversations in order of their first questions, until they have all requests."""
        times = RATES[self.shape](self, Random(f"times {self.seed}"))
        random = Random(f"asked {self.seed}")
        place_of = self._places()
        left = self.requests
        for number, at in enumerate(times):
            image, visual = "", 0
            if random.random() >= self.text:
                place = place_of(random.random())
                image, visual = f"image-{place}", self._size(place)
            count = min(left, self._turns(random))
            turns = tuple(self._turn(random, first=not turn) for turn in range(count))
            yield Conversation(at, f"conversation-{number}", image, visual, turns)
            left -= count
            if not left:
                return

    def _places(self) -> Callable[[float], int]:
        """Return the function from a number between 0 and 1 to an image, by popularity."""
        if not self.zipf:
            return lambda number: int(number * self.images)
        popularity = list(itertools.accumulate(rank**-self.zipf for rank in range(1, self.images + 1)))
        return lambda number: min(bisect(popularity, number * popularity[-1]), self.images - 1)

    def _size(self, image: int) -> int:
        """The size of an image, which follows from its number: its hash by Knuth's multiplication."""
        return self.visual_tokens[(image * 2654435761 + self.seed >> 7) % len(self.visual_tokens)]

    def _turns(self, random: Random) -> int:
        """Draw a number of questions: geometrically distributed, at most 8 times the mean."""
        if self.turns == 1:
            return 1
        number = 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - 1.0 / self.turns))
        return min(number, math.ceil(8 * self.turns))

    def _turn(self, random: Random, *, first: bool) -> Turn:
        think_s = 0.0 if first or not self.think_s else random.expovariate(1 / self.think_s)
        return Turn(geometric(random, self.prompt_tokens), geometric(random, self.output_tokens), think_s)

    def as_trace(self) -> tuple[Trace, Mapping[int, Next]]:
        """Return the load for `engine.simulate`: requests, and which one follows which."""
        trace: list[TraceRequest] = []
        following: dict[int, Next] = {}
        for one in self.conversations():
            for number, turn in enumerate(one.turns):
                if number:
                    following[len(trace) - 1] = Next(len(trace), continues=True)
                    trace.append(TraceRequest(turn.think_s, turn.text, turn.output))
                    continue
                images = ((one.image, one.visual),) if one.image else ()
                trace.append(TraceRequest(one.at, turn.text, turn.output, images, self.system_tokens))
        return tuple(trace), following


@dataclass(frozen=True)
class TraceLoad:
    """The requests of a trace: each is a conversation of one question. Raises ConfigError without requests.

    seed: of the fleet's disturbances.
    """

    trace: Trace
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.trace:
            raise ConfigError("the trace has no request; accepted: one or more", param="trace")

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.trace)

    @property
    def rate(self) -> float:
        """Mean requests per second."""
        return len(self.trace) / (self.trace[-1].at or 1.0)

    @property
    def system_tokens(self) -> int:
        """The tokens that all prompts begin with: a system prompt that only some have counts as text."""
        return min(one.system for one in self.trace)

    def conversations(self) -> Iterator[Conversation]:
        """Yield the requests. Several images of one are a single one that is encoded in parts."""
        common = self.system_tokens
        for number, one in enumerate(self.trace):
            image = " + ".join(key for key, _ in one.images)
            turn = Turn(one.text + one.system - common, one.output, 0.0)
            visual = sum(tokens for _, tokens in one.images)
            yield Conversation(one.at, f"request-{number}", image, visual, (turn,), max(1, len(one.images)))


def _steady(load: Load, random: Random) -> Iterator[float]:
    at = 0.0
    while True:
        at += random.expovariate(load.rate / load.turns)
        yield at


def _daily(load: Load, random: Random) -> Iterator[float]:
    """Begin at the lowest rate. Times are drawn at the highest rate, and some are left out (thinning)."""
    at, most = 0.0, 1 + load.swing
    while True:
        at += random.expovariate(most * load.rate / load.turns)
        now = 1 - load.swing * math.cos(2 * math.pi * at / load.day_s)
        if random.random() * most < now:
            yield at


def _bursty(load: Load, random: Random) -> Iterator[float]:
    """Two rates that follow each other: a Poisson process that a Markov chain modulates."""
    cycle = load.calm_s + load.burst_s
    calm = load.rate / load.turns * cycle / (load.calm_s + load.burst_factor * load.burst_s)
    at, begins = 0.0, 0.0
    while True:
        for rate, mean in ((calm, load.calm_s), (calm * load.burst_factor, load.burst_s)):
            ends = begins + random.expovariate(1 / mean)
            at = begins
            while (at := at + random.expovariate(rate)) < ends:
                yield at
            begins = ends


RATES: Mapping[str, Callable[[Load, Random], Iterator[float]]] = {
    "steady": _steady,
    "daily": _daily,
    "bursty": _bursty,
}
