"""Traces: lists of requests with arrival times and sizes, read from files or drawn at random.

A line of a file is {"at": 0.25, "text": 40, "images": [["cat", 256]], "output": 64}. Fields for which
`TraceRequest` has a default may be left out. A `Workload` describes a random trace; the same seed gives the
same trace on every machine.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

from fovea.core.config_files import check_keys
from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting

TEXT_BITS = 24
"""A request's text, output, system and priority are less than two to this power."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace: its arrival time and its sizes in tokens.

    at: arrival, seconds from the start of the trace.
    text: tokens of the user's text; no other request has the same ones.
    output: tokens of the answer.
    images: (key, visual tokens) of each image, between the system prompt and the text. Equal keys are equal
        images.
    system: tokens of the system prompt. All requests take them from the start of one common text.
    priority: smaller is served first, if the policy uses priorities.
    timeout: seconds after which the client gives up; null: never.

    Raises ConfigError for a value out of range.
    """

    at: float
    text: int
    output: int
    images: tuple[tuple[str, int], ...] = ()
    system: int = 0
    priority: int = 0
    timeout: float | None = None

    def __post_init__(self) -> None:
        for name, low in (("text", 1), ("output", 1), ("system", 0), ("priority", -(2**31))):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 1 << TEXT_BITS:
                raise ConfigError(f"{name} is {value!r}; accepted: a whole number from {low} on", param=name)
        for name, number in (("at", self.at), ("timeout", 1 if self.timeout is None else self.timeout)):
            if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number < 1e9:
                raise ConfigError(f"{name} is {number!r}; accepted: seconds from 0 on", param=name)
        object.__setattr__(self, "images", _images(self.images))

    @property
    def prompt_tokens(self) -> int:
        return self.system + sum(tokens for _, tokens in self.images) + self.text


Trace = tuple[TraceRequest, ...]


def read_trace(path: Path) -> Trace:
    """Read a trace file; return its requests in order of arrival.

    Raises ConfigError that names the line, the field and the accepted values.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="trace") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text", param="trace") from error
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(_request(line))
        except ConfigError as error:
            raise ConfigError(f"{path}:{number}: {error.message}", param="trace") from error
    if not requests:
        raise ConfigError(f"{path} holds no request", param="trace")
    return tuple(sorted(requests, key=lambda request: request.at))


def write_trace(path: Path, trace: Iterable[TraceRequest]) -> None:
    """Write a trace file. Raises ConfigError if that fails."""
    try:
        path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in trace), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", param="save_trace") from error


def _request(line: str) -> TraceRequest:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError("not a JSON object")
    known = [field.name for field in fields(TraceRequest)]
    check_keys("", values, known, "field")
    for name in ("at", "text", "output"):
        if name not in values:
            raise ConfigError(f"{name} is missing")
    return TraceRequest(**values)


def _images(value: Any) -> tuple[tuple[str, int], ...]:
    """Check and convert a JSON value to pairs of key and visual tokens. Raises ConfigError."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"images is {value!r}; accepted: a list of [key, visual tokens]", param="images")
    pairs = []
    for index, pair in enumerate(value):
        good = isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str)
        if not good or not isinstance(pair[1], int) or isinstance(pair[1], bool) or pair[1] < 1:
            raise ConfigError(
                f"images[{index}] is {pair!r}; accepted: [key, visual tokens from 1 on]", param="images"
            )
        pairs.append((pair[0], pair[1]))
    return tuple(pairs)


BURST = 16
"""Requests that arrive at the same time in a burst."""
RAMP_FROM = 0.2
"""Share of the mean rate at the start of a ramp; at its end it is 2 minus this."""


def _arrivals(name: str) -> str:
    return "" if name in ARRIVALS else ", ".join(ARRIVALS)


@dataclass(frozen=True, slots=True)
class Workload:
    """Parameters of a random trace. Raises ConfigError for a value out of range."""

    requests: int = setting(2000, "Number of requests.", low=1, high=10**6)
    rate: float = setting(4.0, "Mean requests per second.", low=1e-06, high=1e6)
    arrivals: str = setting(
        "poisson",
        "Arrival times: poisson (independent), ramp (poisson, from 0.2 to 1.8 times the rate), "
        "burst (16 at a time).",
        check=_arrivals,
    )
    text: float = setting(0.5, "Share of requests without an image.", low=0, high=1)
    images: int = setting(300, "Number of distinct images.", low=1, high=10**6)
    zipf: float = setting(
        1.1,
        "Exponent of the images' popularity: the n-th most popular is used n**-zipf times as often as the "
        "first; 0: all equally often.",
        low=0,
        high=10,
    )
    images_per_request: int = setting(1, "Number of images of a request that has any.", low=1, high=64)
    visual_tokens: tuple[int, ...] = setting(
        (64, 256, 1024),
        "Possible visual tokens of an image, each with equal probability.",
        low=1,
        high=10**6,
        nonempty=True,
    )
    prompt_tokens: int = setting(
        40, "Mean tokens of a prompt's text, geometrically distributed.", low=1, high=10**6
    )
    output_tokens: int = setting(
        64, "Mean tokens of an answer, geometrically distributed.", low=1, high=10**6
    )
    system_tokens: int = setting(0, "Tokens of a system prompt that all requests share.", low=0, high=10**6)
    timeout: float = setting(0.0, "Seconds after which the client gives up; 0: never.", low=0, high=10**6)
    seed: int = setting(0, "The same seed gives the same trace.", low=0, high=2**31)

    def __post_init__(self) -> None:
        check_settings(self)


def generate(workload: Workload) -> Trace:
    """Generate the requests of a workload in order of arrival.

    Sizes do not depend on arrival times: other rates give the same requests at other times.
    """
    times = ARRIVALS[workload.arrivals](workload, Random(f"times {workload.seed}"))
    random = Random(f"asked {workload.seed}")
    popularity = list(itertools.accumulate(rank**-workload.zipf for rank in range(1, workload.images + 1)))
    sizes = [
        Random(f"size {workload.seed} {image}").choice(workload.visual_tokens)
        for image in range(workload.images)
    ]
    requests = []
    for at in itertools.islice(times, workload.requests):
        images: list[tuple[str, int]] = []
        if random.random() >= workload.text:
            for _ in range(workload.images_per_request):
                image = min(bisect(popularity, random.random() * popularity[-1]), workload.images - 1)
                images.append((f"image-{image}", sizes[image]))
        prompt, output = geometric(random, workload.prompt_tokens), geometric(random, workload.output_tokens)
        timeout = workload.timeout or None
        requests.append(TraceRequest(at, prompt, output, tuple(images), workload.system_tokens, 0, timeout))
    return tuple(requests)


def geometric(random: Random, mean: int) -> int:
    """Draw a whole number from 1 on: geometrically distributed with this mean, at most 8 times the mean."""
    if mean == 1:
        return 1
    number = 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - 1.0 / mean))
    return min(number, 8 * mean)


def _poisson(workload: Workload, random: Random) -> Iterator[float]:
    at = 0.0
    while True:
        at += random.expovariate(workload.rate)
        yield at


def _ramp(workload: Workload, random: Random) -> Iterator[float]:
    at = 0.0
    for number in itertools.count():
        share = min(1.0, number / workload.requests)
        at += random.expovariate(workload.rate * (RAMP_FROM + (2 - 2 * RAMP_FROM) * share))
        yield at


def _burst(workload: Workload, random: Random) -> Iterator[float]:
    at = 0.0
    while True:
        at += random.expovariate(workload.rate / BURST)
        yield from [at] * BURST


ARRIVALS: dict[str, Callable[[Workload, Random], Iterator[float]]] = {
    "poisson": _poisson,
    "ramp": _ramp,
    "burst": _burst,
}
