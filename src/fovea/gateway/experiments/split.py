"""Chooses the variant of a request: the same one for the same sticky value, on every worker, without memory.

Every variant draws a number for the sticky value: its hash, as a point u between 0 and 1, gives the time
-ln(u) / weight of an exponential clock, and the earliest clock wins. A variant wins with a probability in
proportion to its weight. If the weight of one variant grows, its clocks become earlier and all others stay as
they are, so requests move to that variant only, and no more than have to. (Weighted rendezvous hashing:
Thaler and Ravishankar 1998; the weighted form is that of Schindelhauer and Schomaker 2005.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from fovea.gateway.experiments.config import Experiment, Variant

SPLIT = "split"
HEADER = "header"
SHADOW = "shadow"
PROMOTED = "promoted"
ROLLED_BACK = "rolled_back"


class Assignment(NamedTuple):
    """The variant that a request gets, and why.

    model: name of the served model.
    reason: `split` (by weight), `header` (the client named it), `shadow` (a copy), `promoted` or
        `rolled_back` (the experiment is decided).
    generation: that of the numbers to which the outcome belongs.
    """

    experiment: str
    variant: str
    model: str
    reason: str
    generation: int = 0

    @property
    def is_counted(self) -> bool:
        """Whether the outcome belongs into the comparison: who gets the variant was chosen at random."""
        return self.reason in (SPLIT, SHADOW)


class Splitter:
    """The weights of an experiment's variants, ready to choose."""

    __slots__ = ("_clocks",)

    def __init__(self, experiment: Experiment, removed: Iterable[str] = ()) -> None:
        """removed: names of variants that get no more requests."""
        gone = {*removed, experiment.shadow.variant}
        self._clocks: list[tuple[Variant, Callable[[], hashlib.blake2b], float]] = [
            (variant, _salted(experiment.name, variant.name).copy, 1 / variant.weight)
            for variant in experiment.variants
            if variant.name not in gone and variant.weight > 0
        ]

    def choose(self, sticky: str) -> Variant:
        """Return the variant of a sticky value."""
        data = sticky.encode("utf-8", "surrogatepass")
        best, earliest = self._clocks[0][0], math.inf
        for variant, start, scale in self._clocks:
            digest = start()
            digest.update(data)
            point = (int.from_bytes(digest.digest(), "big") + 0.5) / 18446744073709551616.0
            time = -math.log(point) * scale
            if time < earliest:
                best, earliest = variant, time
        return best


def _salted(experiment: str, variant: str) -> hashlib.blake2b:
    """Return a hash that differs between experiments, so that their splits are independent."""
    return hashlib.blake2b(f"{experiment}\0{variant}\0".encode(), digest_size=8)
