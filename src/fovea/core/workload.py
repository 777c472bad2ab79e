"""Random traces: arrival times and sizes of requests. The same seed gives the same trace on every machine."""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from fovea.core.errors import ConfigError
from fovea.core.trace import Trace, TraceRequest

BURST = 16
"""Requests that arrive at the same time in a burst."""
RAMP_FROM = 0.2
"""Share of the mean rate at the start of a ramp; at its end it is 2 minus this."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Parameters of a random trace.

    requests: number of requests. [1, 10**6].
    rate: mean requests per second. [1e-6, 10**6].
    arrivals: "poisson" (independent), "ramp" (poisson, from 0.2 to 1.8 times the rate), "burst" (16 at a
        time).
    text: share of requests without an image. [0, 1].
    images: number of distinct images. [1, 10**6].
    zipf: exponent of the images' popularity: the n-th most popular is used n**-zipf times as often as the
        first; 0: all alike. [0, 10].
    images_per_request: number of images of a request that has any. [1, 64].
    visual_tokens: possible visual tokens of an image, each with equal probability.
    prompt_tokens: mean tokens of a prompt's text, geometrically distributed. [1, 10**6].
    output_tokens: mean tokens of an answer, geometrically distributed. [1, 10**6].
    system_tokens: tokens of a system prompt that all requests share. [0, 10**6].
    timeout: seconds after which the client gives up; 0: never. [0, 10**6].
    seed: the same seed gives the same trace. [0, 2**31].

    Raises ConfigError for a value out of range.
    """

    requests: int = 2000
    rate: float = 4.0
    arrivals: str = "poisson"
    text: float = 0.5
    images: int = 300
    zipf: float = 1.1
    images_per_request: int = 1
    visual_tokens: tuple[int, ...] = (64, 256, 1024)
    prompt_tokens: int = 40
    output_tokens: int = 64
    system_tokens: int = 0
    timeout: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("requests", 1, 10**6),
            ("rate", 1e-6, 1e6),
            ("text", 0, 1),
            ("images", 1, 10**6),
            ("zipf", 0, 10),
            ("images_per_request", 1, 64),
            ("prompt_tokens", 1, 10**6),
            ("output_tokens", 1, 10**6),
            ("system_tokens", 0, 10**6),
            ("timeout", 0, 10**6),
            ("seed", 0, 2**31),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}; accepted: {low:g} to {high:g}", param=name)
        if self.arrivals not in ARRIVALS:
            raise ConfigError(
                f"arrivals is {self.arrivals!r}; accepted: {', '.join(ARRIVALS)}", param="arrivals"
            )
        if not self.visual_tokens or not all(1 <= size <= 10**6 for size in self.visual_tokens):
            raise ConfigError(
                f"visual_tokens is {self.visual_tokens!r}; accepted: sizes from 1 to 1e+06",
                param="visual_tokens",
            )


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
