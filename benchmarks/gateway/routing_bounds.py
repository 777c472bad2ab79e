"""Compare policies and their bounds under much load, with simulated engines on a virtual clock.

    python benchmarks/gateway/routing_bounds.py [--requests 8000] [--engines 4]

The gateway's own router chooses. So many clients send one request after the other, about images of 64 to
1,024 visual tokens, each drawn from 400. "even": all images are equally popular. "skewed": the most popular
one gets 15% of the requests (Zipf's law). "hot": one gets 60%. An engine keeps the last 150 images that it
has seen. It encodes unknown images one after the other, 1 ms for each token. Then an answer takes 0.4 s
alone, and twice as long among 32.

  warm       which part of the requests about known images went to an engine that knows the image
  per s      requests per second of the virtual clock
  p50, p95   seconds from sending to the end
  busiest    most requests that one engine had at once, as a multiple of the average

The last line is JSON.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fovea.core.measure import percentile
from fovea.gateway.backends.backend import Backend, Load
from fovea.gateway.backends.fleet import Fleet
from fovea.gateway.backends.route import Router
from fovea.gateway.config import BackendConfig, ModelConfig
from fovea.gateway.inspect.body import Body
from fovea.gateway.inspect.demand import Demand
from fovea.gateway.settings import ResilienceSettings, RouteSettings

IMAGES, KEPT = 400, 150
ENCODE_S, ANSWER_S, TWICE_AT = 1e-3, 0.4, 32
MIXED = (64, 100, 256, 576, 1024)
TEXT_TOKENS = 80
MODEL = "m"
POPULARITIES = ("even", "skewed", "hot")
HOT = 0.6
CLIENTS = (8, 32, 128, 512)


@dataclass(frozen=True, slots=True)
class Rule:
    """A policy with its settings."""

    policy: str
    balance: float = 1.25
    busy: int = 8

    @property
    def title(self) -> str:
        if self.policy != "cache-affine":
            return self.policy
        return f"cache-affine, balance {self.balance:g}, busy_requests {self.busy}"


RULES = (
    Rule("cache-affine", 1.1), Rule("cache-affine", 1.25), Rule("cache-affine", 1.5), Rule("cache-affine", 2),
    Rule("cache-affine", 100), Rule("cache-affine", 1.5, busy=0), Rule("cache-affine", 1.5, busy=32),
    Rule("least-busy"), Rule("lod-cost"), Rule("round-robin"),
)  # fmt: skip


@dataclass
class Engine:
    """An engine with an encoder that works on one image at a time.

    free_s: when its encoder has done all that waits for it.
    """

    kept: OrderedDict[int, float] = field(default_factory=OrderedDict)
    free_s: float = 0.0

    def end_s(self, image: int, tokens: int, now: float, running: int) -> float:
        """Take a request; return when its answer ends."""
        ready = self.kept.pop(image, -1.0)
        if ready < 0:
            self.free_s = ready = max(now, self.free_s) + ENCODE_S * tokens
        self.kept[image] = ready  # requests that come meanwhile wait for it, too
        if len(self.kept) > KEPT:
            self.kept.popitem(last=False)
        return max(now, ready) + ANSWER_S * (1 + running / TWICE_AT)


@dataclass
class Outcome:
    """The counts and times of one simulation."""

    seconds: list[float] = field(default_factory=list)
    known: int = 0
    warm: int = 0
    most: int = 0
    ended_s: float = 0.0

    def figures(self, clients: int, engines: int) -> dict[str, float]:
        ordered = sorted(self.seconds)
        return {
            "warm": self.warm / (self.known or 1), "per_s": len(ordered) / self.ended_s,
            "p50_s": percentile(ordered, 50), "p95_s": percentile(ordered, 95),
            "busiest": self.most / (clients / engines),
        }  # fmt: skip


def images(popularity: str, seed: int = 1) -> Iterator[int]:
    """Yield numbers of images without end."""
    draw = random.Random(seed)
    weights = [1 / (rank + 1) if popularity == "skewed" else 1.0 for rank in range(IMAGES)]
    if popularity == "hot":
        weights[0] = HOT / (1 - HOT) * (IMAGES - 1)
    while True:
        yield from draw.choices(range(IMAGES), weights, k=1024)


def tokens_of(image: int) -> int:
    return MIXED[image % len(MIXED)]


def demand(image: int) -> Demand:
    """The demand of a request whose conversation is named after its image: it is routed in the same way."""
    return Demand(Body({"model": MODEL, "session_id": f"image {image}"}, {}, 0), [])


def simulate(rule: Rule, clients: int, engines: int, requests: int, popularity: str) -> dict[str, float]:
    """Play the requests on a virtual clock."""
    now, outcome = 0.0, Outcome()
    fleet = Fleet(ResilienceSettings())
    fleet.configure([ModelConfig(MODEL)])
    fleet.update([BackendConfig(f"http://e{n}", f"engine-{n}", (MODEL,)) for n in range(engines)], now)
    settings = RouteSettings(policy=rule.policy, balance=rule.balance, busy_requests=rule.busy)
    router, model = Router(fleet, settings, lambda: now), fleet.model(MODEL)
    machines = {backend.name: Engine() for backend in fleet}
    asked: dict[int, set[str]] = {}
    demands = [demand(image) for image in range(IMAGES)]
    events: list[tuple[float, int, Backend | None, Load | None]] = [
        (0.0, n, None, None) for n in range(clients)
    ]
    numbers = itertools.count(clients)
    source = images(popularity)
    while events:
        now, _, ended, load = heapq.heappop(events)
        if ended is not None and load is not None:
            ended.end(load)
        if len(outcome.seconds) >= requests:
            continue
        image = next(source)
        load = Load(TEXT_TOKENS, tokens_of(image))
        choice = router.choose(model, demands[image], load)
        assert choice is not None  # every backend is healthy
        backend = choice.backend
        seen = asked.setdefault(image, set())
        outcome.known += bool(seen)
        outcome.warm += backend.name in seen
        seen.add(backend.name)
        end = machines[backend.name].end_s(image, load.visual, now, backend.requests)
        backend.note_first_byte(end - now, load.tokens)
        backend.begin(load, now, vision=True)
        outcome.most = max(outcome.most, backend.requests)
        outcome.seconds.append(end - now)
        outcome.ended_s = max(outcome.ended_s, end)
        heapq.heappush(events, (end, next(numbers), backend, load))
    return outcome.figures(clients, engines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=8000, help="requests of each simulation")
    parser.add_argument("--engines", type=int, default=4)
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for popularity, clients in itertools.product(POPULARITIES, CLIENTS):
        print(f"\n{popularity}, {clients} clients")
        print(f"{'':46}{'warm':>8}{'per s':>8}{'p50':>8}{'p95':>8}{'busiest':>8}")
        for rule in RULES:
            one = simulate(rule, clients, options.engines, options.requests, popularity)
            print(
                f"{rule.title:46}{one['warm']:8.1%}{one['per_s']:8.1f}{one['p50_s']:8.2f}{one['p95_s']:8.2f}"
                f"{one['busiest']:8.2f}"
            )
            rows.append({"popularity": popularity, "clients": clients, "rule": rule.title, **one})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
