"""Traces by chance: when requests come, and what they ask. The same seed gives the same trace, on any machine."""

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
RAMP_FROM = 0.2


@dataclass(frozen=True, slots=True)
class Workload:
    """requests: how many. [1, 10**6].
    rate: requests per second, in the mean. (0, 10**6].
    arrivals: "poisson" (independent), "ramp" (poisson, from 0.2 to 1.8 times the rate), "burst" (16 at a time).
    text: share of requests without an image. [0, 1].
    images: distinct images. [1, 10**6].
    zipf: how uneven their popularity is; 0: all alike; the n-th most popular is asked for n**-zipf times as often. [0, 10].
    images_per_request: of a request that has any. [1, 64].
    visual_tokens: sizes that images have, each equally often.
    prompt_tokens: text of a prompt, in the mean (geometric). [1, 10**6].
    output_tokens: of an answer, in the mean (geometric). [1, 10**6].
    system_tokens: of a system prompt that all share. [0, 10**6].
    timeout: seconds after which a request is given up; 0: never. [0, 10**6].
    seed: the same gives the same trace. [0, 2**31].
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


def generate(load: Workload) -> Trace:
    """What is asked does not depend on when: other rates give the same requests at other times."""
    times, asked = ARRIVALS[load.arrivals](load, Random(f"times {load.seed}")), Random(f"asked {load.seed}")
    popularity = list(itertools.accumulate(rank**-load.zipf for rank in range(1, load.images + 1)))
    sizes = [Random(f"size {load.seed} {image}").choice(load.visual_tokens) for image in range(load.images)]
    requests = []
    for at in itertools.islice(times, load.requests):
        images: list[tuple[str, int]] = []
        if asked.random() >= load.text:
            for _ in range(load.images_per_request):
                image = min(bisect(popularity, asked.random() * popularity[-1]), load.images - 1)
                images.append((f"image-{image}", sizes[image]))
        prompt, output = geometric(asked, load.prompt_tokens), geometric(asked, load.output_tokens)
        timeout = load.timeout or None
        requests.append(TraceRequest(at, prompt, output, tuple(images), load.system_tokens, 0, timeout))
    return tuple(requests)


def geometric(random: Random, mean: int) -> int:
    """Geometric from 1 on, at most 8 times the mean: many short, few long."""
    if mean == 1:
        return 1
    drawn = 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - 1.0 / mean))
    return min(drawn, 8 * mean)


def _poisson(load: Workload, random: Random) -> Iterator[float]:
    at = 0.0
    while True:
        at += random.expovariate(load.rate)
        yield at


def _ramp(load: Workload, random: Random) -> Iterator[float]:
    at = 0.0
    for number in itertools.count():
        share = min(1.0, number / load.requests)
        at += random.expovariate(load.rate * (RAMP_FROM + (2 - 2 * RAMP_FROM) * share))
        yield at


def _burst(load: Workload, random: Random) -> Iterator[float]:
    at = 0.0
    while True:
        at += random.expovariate(load.rate / BURST)
        yield from [at] * BURST


ARRIVALS: dict[str, Callable[[Workload, Random], Iterator[float]]] = {
    "poisson": _poisson,
    "ramp": _ramp,
    "burst": _burst,
}
