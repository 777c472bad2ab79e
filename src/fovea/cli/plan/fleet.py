"""A plan of several replicas on the simulated fleet: what routing gives, and how many replicas are needed.

The formulas of a plan take every replica alone, with the images that it has seen. Behind a gateway that
depends on the policy, so the workload is served by a simulated fleet, with caches that begin empty.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from fovea.cluster.fleet.load import Conversation, Turn
from fovea.cluster.fleet.replica import ReplicaSpec
from fovea.cluster.fleet.report import FleetFigures
from fovea.cluster.fleet.simulate import PaperFleet, simulate_paper_fleet
from fovea.core.trace import geometric
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.simulate.fleet import Fleet
from fovea.engine.simulate.run import Bounds
from fovea.planner.cost import CostModel
from fovea.planner.option import Option, PlannedKind
from fovea.planner.workload import Workload

AFFINE, PLAIN = "cache-affine", "round-robin"
MOST = 12
"""Most replicas that are simulated. More are represented by these, at their part of the rate."""
SECONDS = 60.0
"""Virtual seconds of a run, in which most requests come, think and ask again."""
FEWEST_REQUESTS, MOST_REQUESTS = 400, 6000
"""Bounds of the requests of a run."""
WARM = 0.25
"""Share of the time after which requests count: before it, caches are empty and few users ask again."""
RECENT = 200
"""Images of each replica that later conversations can be about again."""
THINK_S = 5.0
"""Mean pause of a user before a follow-up, as in the simulation of one replica."""
SEEDS = (0, 1)
"""Loads that are played. Their difference tells how sure the figures are."""
UNBOUNDED_S = 1e6


@dataclass(frozen=True, slots=True)
class Routed:
    """A fleet under one policy.

    within: share of the requests that kept both targets.
    encoder_hits, prefix_hits: see `FleetFigures`.
    ttft_p50_s, ttft_p99_s: times to the first token.
    """

    within: float
    encoder_hits: float
    prefix_hits: float
    ttft_p50_s: float
    ttft_p99_s: float


@dataclass(frozen=True, slots=True)
class PlannedFleet:
    """The plan's replicas behind a gateway.

    replicas: as many as the formulas say. simulated: as many were simulated in their place.
    requests: of one run.
    affine, plain: the figures with the gateway's default policy, and with round-robin.
    needed: fewest replicas with which each of the loads kept the targets, by load; empty: without targets.
    """

    replicas: int
    simulated: int
    requests: int
    affine: Routed
    plain: Routed
    needed: tuple[int, ...]

    def sentences(self, workload: Workload) -> list[str]:
        """Return what the simulation found, in one or two lines."""
        scope = "" if self.simulated == self.replicas else f", {self.simulated} stand for them"
        affine, plain = self.affine, self.plain
        lines = [
            f"routing of {self.replicas} replicas ({self.requests:,} simulated requests{scope}): {AFFINE} "
            f"finds {_percent(affine.encoder_hits)} of the images encoded and "
            f"{_percent(affine.prefix_hits)} of the prompts computed, first token "
            f"{1e3 * affine.ttft_p50_s:,.0f} ms at 50%; {PLAIN} "
            f"{_percent(plain.encoder_hits)}, {_percent(plain.prefix_hits)}, {1e3 * plain.ttft_p50_s:,.0f} ms"
        ]
        if not self.needed:
            return lines
        few, many = min(self.needed), max(self.needed)
        needs = f"{many}" if few == many else f"{few} to {many}"
        agree = "equal in" if few == many else "differs in"
        kept = (
            f"{affine.within:.1%} of requests keep the targets with {self.replicas}, {plain.within:.1%} with"
        )
        lines.append(
            f"the simulated fleet needs {needs} replicas for {workload.percentile:g}% ({agree} "
            f"{len(self.needed)} random loads; formulas: {self.replicas}); {kept} {PLAIN}"
        )
        return lines


@dataclass(frozen=True)
class PlannedLoad:
    """The conversations of a workload's kinds.

    rate: conversations per second. requests: about how many questions.
    replicas: over which the images of earlier conversations are spread.
    """

    kinds: tuple[PlannedKind, ...]
    system_tokens: int
    rate: float
    requests: int
    replicas: int
    seed: int

    def conversations(self) -> Iterator[Conversation]:
        """Yield the conversations in order of their first questions."""
        random = Random(f"plan {self.seed}")
        weights = [one.share / (1 + one.kind.follow_ups) for one in self.kinds]
        recent = {one.kind.name: deque[str](maxlen=RECENT * self.replicas) for one in self.kinds}
        at, left, number = 0.0, self.requests, 0
        while left > 0:
            at += random.expovariate(self.rate)
            one = random.choices(self.kinds, weights)[0]
            number += 1
            image, known = "", recent[one.kind.name]
            if one.tokens.visual:
                again = known and random.random() < one.kind.seen
                image = random.choice(known) if again else f"image {number}"
                if not again:
                    known.append(image)
            turns = tuple(
                self._turn(one, random, first=not turn) for turn in range(1 + self._more(one, random))
            )
            left -= len(turns)
            pictures = max(1, len(one.tokens.images))
            yield Conversation(at, f"conversation {number}", image, one.tokens.visual, turns, pictures)

    def _more(self, one: PlannedKind, random: Random) -> int:
        """A number of follow-ups: the whole part of the mean, and one more with the rest's probability."""
        return int(one.kind.follow_ups) + (random.random() < one.kind.follow_ups % 1)

    def _turn(self, one: PlannedKind, random: Random, *, first: bool) -> Turn:
        chosen = one.tokens.chosen / one.kind.answer
        output = max(1, round(chosen * geometric(random, one.kind.answer)))
        return Turn(
            geometric(random, one.kind.text), output, 0.0 if first else random.expovariate(1 / THINK_S)
        )


def plan_fleet(option: Option, workload: Workload, cost: CostModel) -> PlannedFleet | None:
    """Simulate the replicas of a plan; None: one is enough, or no number meets the targets.

    cost: times of a replica, with those of images by their tokens in the prompt.
    """
    if option.replicas < 2:
        return None
    config = EngineConfig.of(
        kv_cache_mib=max(1, option.capacity.kv // MIB),
        max_running=max(1, option.max_running),
        max_queue=0,
        embed_cache_mib=max(1, option.capacity.encoder_cache // MIB),
    )
    spec = ReplicaSpec.of(config, cost)
    prepare = sum(one.share * one.demand.prepare for one in option.kinds)
    bounds = Bounds(
        max(1e-6, workload.ttft_ms / 1e3 - prepare) if workload.ttft_ms else UNBOUNDED_S,
        workload.itl_ms / 1e3 if workload.itl_ms else UNBOUNDED_S,
    )
    simulated = min(MOST, option.replicas)
    part = simulated / option.replicas
    requests = round(SECONDS * workload.requests_per_s * part)
    requests = min(MOST_REQUESTS, max(FEWEST_REQUESTS, requests))

    def play(replicas: int, seed: int, route: str) -> tuple[FleetFigures, float]:
        load = PlannedLoad(option.kinds, workload.system, workload.rate * part, requests, replicas, seed)
        seconds = requests / (workload.requests_per_s * part)
        fleet = PaperFleet(spec, Fleet(replicas), route, bounds=bounds, interval_s=max(0.01, seconds / 40))
        figures = simulate_paper_fleet(fleet, load)
        return figures, _within(figures)

    def fewest(seed: int) -> int:
        """Find the fewest replicas that keep the targets, between half and twice those of the formulas."""
        low, high = math.ceil(simulated / 2), 2 * simulated
        while low < high:
            middle = (low + high) // 2
            if play(middle, seed, AFFINE)[1] >= workload.percentile / 100:
                high = middle
            else:
                low = middle + 1
        return math.ceil(low / part - 1e-9)

    affine, plain = (_routed(*play(simulated, SEEDS[0], route)) for route in (AFFINE, PLAIN))
    targets = workload.ttft_ms or workload.itl_ms
    needed = tuple(fewest(seed) for seed in SEEDS) if targets else ()
    return PlannedFleet(option.replicas, simulated, requests, affine, plain, needed)


def _within(figures: FleetFigures) -> float:
    """Return the share of good requests among those that ended while the fleet was warm and loaded."""
    moments = [one for one in figures.timeline if WARM * figures.seconds < one.at <= figures.seconds]
    ended = sum(sum(one.outcomes.values()) for one in moments)
    return sum(one.outcomes["good"] for one in moments) / ended if ended else 1.0


def _routed(figures: FleetFigures, within: float) -> Routed:
    return Routed(within, figures.encoder_hits, figures.prefix_hits, figures.ttft_p50_s, figures.ttft_p99_s)


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"
