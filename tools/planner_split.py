"""Prints the planner's figures of encoders apart beside those of the simulator, as a Markdown table.

python -m tools.planner_split

Both serve the same workload by as many replicas, once with encoders apart and once without. Requests/s are
the highest rates; the simulator gets more load than it can serve. Gaps are those at 70% of the lower one.
The planner uses `planner.parallel.best_split`, the simulator the engine's scheduler. docs/roles.md has the
table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from random import Random
from statistics import fmean

from fovea.core.markdown import markdown_table
from fovea.core.trace import Trace, TraceRequest, geometric
from fovea.engine.config import EngineConfig
from fovea.engine.simulate.fleet import Fleet, simulate_fleet
from fovea.engine.simulate.report import Record
from fovea.engine.vision.token_rules import known_rule
from fovea.planner.hardware import find, known_hardware
from fovea.planner.option import Option, evaluate
from fovea.planner.parallel import Split, best_split
from fovea.planner.precision import RECIPES
from fovea.planner.roofline import Setup
from fovea.planner.shape import find as find_model
from fovea.planner.workload import ImageTokens, Kind, Workload

MODEL, HARDWARE, REPLICAS, RUNNING = "Qwen/Qwen2.5-VL-7B-Instruct", "L40S", 4, 32
"""The model, its device, replicas, and sequences at once of each."""
REQUESTS, OVERLOAD = 600, 1.5
"""Requests of a simulation; multiple of the highest rate that more load than can be served has."""


@dataclass(frozen=True)
class Case:
    """One workload."""

    name: str
    kinds: tuple[Kind, ...]


CASES = (
    Case(
        "one page of 1240x1754 pixels, answers of 20 tokens",
        (Kind("c", images=((1240, 1754),), text=20, answer=20),),
    ),
    Case(
        "half text with answers of 200 tokens, half one picture of 1024x768",
        (Kind("chat", 0.5, text=200, answer=200), Kind("ask", 0.5, images=((1024, 768),), answer=100)),
    ),
    Case(
        "nine of ten text with answers of 300 tokens, one four pictures of 448x448",
        (Kind("chat", 0.9, text=200, answer=300), Kind("ask", 0.1, images=((448, 448),) * 4, answer=100)),
    ),
)


@dataclass(frozen=True)
class Rates:
    """The planner's figures, and those of the simulator both ways.

    per_s: requests per second under overload. itl_s: mean time between tokens at `split.at_per_s`.
    """

    split: Split
    per_s: float
    integrated_per_s: float
    itl_s: float
    integrated_itl_s: float


@cache
def compare(case: Case) -> Rates:
    shape, rule = find_model(MODEL), known_rule(MODEL)
    assert shape is not None
    assert rule is not None

    def count(width: int, height: int) -> ImageTokens:
        tokens = rule.tokens(width, height)
        return ImageTokens(tokens, tokens)

    workload = Workload(case.kinds, rate=1e3)
    setup = Setup(shape, find(HARDWARE, known_hardware()), RECIPES["none"])
    option = replace(evaluate(setup, workload, count), max_running=RUNNING)
    split = best_split(option, workload, REPLICAS)
    assert split is not None
    fleet = Fleet(split.decoders, split.encoders)
    full = trace_of(option, OVERLOAD * split.integrated_per_s)
    some = trace_of(option, split.at_per_s)
    return Rates(
        split,
        *(answers_per_s(full, option, one) for one in (fleet, fleet.integrated)),
        *(mean_gap(some, option, one) for one in (fleet, fleet.integrated)),
    )


def serve(trace: Trace, option: Option, fleet: Fleet) -> list[Record]:
    config = EngineConfig.of(max_running=RUNNING, max_queue=0, kv_cache_mib=8192, embed_cache_mib=4096)
    return simulate_fleet(trace, config, option.cost, fleet).records


def answers_per_s(trace: Trace, option: Option, fleet: Fleet) -> float:
    """Answers per second between a fifth and two thirds of them, when all replicas are busy."""
    ends = sorted(record.ended or 0.0 for record in serve(trace, option, fleet))
    low, high = len(ends) // 5, 2 * len(ends) // 3
    return (high - low) / (ends[high] - ends[low])


def mean_gap(trace: Trace, option: Option, fleet: Fleet) -> float:
    """Mean time between tokens, without the first quarter of the requests, which find idle replicas."""
    return fmean(gap for record in serve(trace, option, fleet)[len(trace) // 4 :] for gap in record.gaps)


def trace_of(option: Option, rate: float) -> Trace:
    """Independent arrivals of the kinds of requests, each with new images."""
    random, at, requests = Random(0), 0.0, []
    for number in range(REQUESTS):
        at += random.expovariate(rate)
        one = random.choices(option.kinds, [kind.share for kind in option.kinds])[0]
        images = tuple((f"{number} {place}", tokens) for place, tokens in enumerate(one.tokens.encoder_rows))
        requests.append(TraceRequest(at, one.kind.text, geometric(random, one.kind.answer), images))
    return tuple(requests)


def markdown() -> str:
    rows = []
    for case in CASES:
        found = compare(case)
        split = found.split
        rows.append(
            [
                case.name,
                f"{split.encoders} of {REPLICAS}",
                f"{split.requests_per_s:.2f} / {found.per_s:.2f}",
                f"{split.integrated_per_s:.2f} / {found.integrated_per_s:.2f}",
                f"{1e3 * split.itl_s:.0f} / {1e3 * found.itl_s:.0f}",
                f"{1e3 * split.integrated_itl_s:.0f} / {1e3 * found.integrated_itl_s:.0f}",
            ]
        )
    titles = ("workload", "encoders", "apart, requests/s", "integrated, requests/s")
    return markdown_table((*titles, "apart, mean gap, ms", "integrated, mean gap, ms"), rows)


if __name__ == "__main__":
    print(markdown())
