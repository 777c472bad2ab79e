"""Experiments, outcomes and simulated arms for the tests of A/B experiments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from fovea.gateway.experiments.config import Experiment, ExperimentConfig, ExperimentSettings, Variant
from fovea.gateway.experiments.statistics import Outcome, Statistics
from fovea.gateway.usage.prices import Consumption

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "gateway"))

OLD, NEW, NEXT = Variant("old", "vlm-1", 90.0), Variant("new", "vlm-2", 10.0), Variant("next", "vlm-3", 1.0)
TOKENS = Consumption(1200, 1000, 0, 80, 1)


def an_experiment(**values: Any) -> Experiment:
    """Return an experiment of the model `vlm` with the variants `old` and `new`."""
    given: dict[str, Any] = {"name": "v2", "model": "vlm", "variants": (OLD, NEW), "sticky_by": "user"}
    return Experiment(**(given | values))


def a_config(folder: Path, *experiments: Experiment, **values: Any) -> ExperimentConfig:
    """Return the configuration of experiments whose state file is in a folder."""
    return ExperimentConfig(ExperimentSettings(folder=folder, **values), experiments or (an_experiment(),))


def an_outcome(number: int = 0, **values: Any) -> Outcome:
    """Return the outcome of a request; its number makes the latency and the cost different."""
    given: dict[str, Any] = {
        "latency_s": 1.0 + number % 7,
        "ttft_s": 0.25,
        "consumption": TOKENS,
        "cost": 2000 + 3 * (number % 11),
    }
    return Outcome(**(given | values))


def arm(
    seed: int,
    requests: int,
    *,
    speed: float = 1.0,
    error_rate: float = 0.001,
    ratings: tuple[float, ...] = (0.05, 0.05, 0.15, 0.40, 0.35),
    cost: float = 2000.0,
    rated: float = 0.3,
) -> Statistics:
    """Return the sums of simulated requests, counted one by one as a gateway counts them."""
    rng, sums = np.random.default_rng(seed), Statistics()
    latencies = speed * rng.lognormal(0, 0.5, requests)
    costs = cost * rng.lognormal(0, 0.5, requests)
    failed = rng.random(requests) < error_rate
    for latency, price, has_failed in zip(latencies.tolist(), costs.tolist(), failed.tolist(), strict=True):
        sums.add(Outcome(latency, None, has_failed, TOKENS, round(price)), 100_000)
    stars = rng.choice(5, int(requests * rated), p=ratings) + 1
    for star in range(1, 6):
        sums.amounts["rating", star] = int((stars == star).sum())
    return sums
