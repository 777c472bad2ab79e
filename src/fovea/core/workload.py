"""Random traces: arrival times and sizes of requests. The same seed gives the same trace on every machine."""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from fovea.core.settings import check_settings, setting
from fovea.core.trace import Trace, TraceRequest

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
