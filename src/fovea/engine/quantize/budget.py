"""Chooses the schemes of single maps so that a copy fits a size and loses as little as possible."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fovea.core.errors import ConfigError
from fovea.engine.quantize.schemes import Scheme


@dataclass(frozen=True, slots=True)
class Option:
    """A scheme for a map. nbytes: of the rounded weight. cost: growth of the loss, in nats per token."""

    scheme: Scheme | None
    nbytes: int
    cost: float


def ladder(scheme: Scheme) -> list[Scheme | None]:
    """Return the schemes for maps that lose too much in `scheme`, from the smallest to the plain weight.

    Weights in 8 bits have the same activations as those in 4 bits.
    """
    if scheme.name != "int4":
        return [scheme, None]
    return [scheme, Scheme("int8", 0, not scheme.unusual), None]


def choose(maps: Mapping[str, Sequence[Option]], room: int) -> dict[str, Scheme | None]:
    """Return a scheme for each map. All maps together take at most `room` bytes.

    maps: the options of each map, from the smallest to the largest.

    Every map begins with its smallest scheme. Then the step to the next scheme that removes most cost for
    each byte is taken, as long as there is room for one.

    Raises ConfigError if the smallest schemes take more.
    """
    left = room - sum(options[0].nbytes for options in maps.values())
    if left < 0:
        raise ConfigError(
            f"--size is {-left:,} bytes less than the copy takes with the schemes of --to; accepted: a "
            "larger size, or schemes of more parts",
            param="size",
        )
    chosen = dict.fromkeys(maps, 0)
    steps: list[tuple[float, str]] = []

    def offer(name: str) -> None:
        options, at = maps[name], chosen[name]
        if at + 1 < len(options):
            here, after = options[at], options[at + 1]
            gain = (here.cost - after.cost) / max(1, after.nbytes - here.nbytes)
            if gain > 0:
                heapq.heappush(steps, (-gain, name))

    for name in maps:
        offer(name)
    while steps:
        _, name = heapq.heappop(steps)
        growth = maps[name][chosen[name] + 1].nbytes - maps[name][chosen[name]].nbytes
        if growth <= left:
            left -= growth
            chosen[name] += 1
            offer(name)
    return {name: maps[name][at].scheme for name, at in chosen.items()}
