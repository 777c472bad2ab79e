"""The numbers of experiments as plain values, for the command line and for /admin/experiments."""

from __future__ import annotations

import dataclasses
import math
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from fovea.core.errors import Unavailable
from fovea.gateway.experiments.config import Experiment
from fovea.gateway.experiments.statistics import Statistics
from fovea.gateway.experiments.store import ACTIVE, State, Store
from fovea.gateway.experiments.verdict import MICRO, verdicts


def read_reports(path: Path) -> list[dict[str, Any]]:
    """Return all experiments of a state file: variants with their shares and numbers, and the verdicts.

    Raises ConfigError or Unavailable if the file cannot be read.
    """
    try:
        with closing(Store(path, create=False)) as store:
            states = store.states()
            return [_report(each, states[each.name], store) for each in store.definitions()]
    except sqlite3.Error as error:
        raise Unavailable(f"the state file of the experiments cannot be read: {error}") from error


def _report(experiment: Experiment, state: State, store: Store) -> dict[str, Any]:
    sums = store.sums(experiment.name)
    shares, copies = shares_of(experiment, state), experiment.shadow
    rows = [
        {
            **numbers(variant.name, sums.get(variant.name, Statistics())),
            "model": variant.model,
            "share": shares.get(variant.name, 0.0),
            "copies": copies.share if variant.name == copies.variant else 0.0,
        }
        for variant in experiment.variants
    ]
    return {
        "name": experiment.name,
        "model": experiment.model,
        **state_values(state),
        "variants": rows,
        "verdicts": [
            {"variant": each.variant, "decision": each.decision, "words": each.words,
             "reasons": [without_infinity(dataclasses.asdict(reason)) for reason in each.reasons]}
            for each in verdicts(experiment, sums)
        ],
    }  # fmt: skip


def shares_of(experiment: Experiment, state: State) -> dict[str, float]:
    """Return the shares of the requests that variants get now. Those that get none are missing."""
    if state.state != ACTIVE:
        return {(experiment.variant(state.promoted) or experiment.baseline).name: 1.0}
    gone = {*state.removed, experiment.shadow.variant}
    takers = [each for each in experiment.variants if each.name not in gone and each.weight]
    weights = {each.name: each.weight for each in takers}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def state_values(state: State) -> dict[str, Any]:
    """Return the state of an experiment by name."""
    return {
        "state": state.state,
        "promoted": state.promoted or None,
        "removed": list(state.removed),
        "reason": state.reason,
        "changed": state.changed,
    }


def numbers(name: str, sums: Statistics) -> dict[str, Any]:
    """Return the numbers of a variant: times in seconds, cost in the currency of the price table."""
    cost = sums.per_request("cost")
    return {
        "variant": name,
        "requests": sums.requests,
        "error_rate": sums.error_rate,
        **{f"p{percent}_s": sums.percentile("latency", percent) for percent in (50, 95, 99)},
        **{f"ttft_p{percent}_s": sums.percentile("ttft", percent) for percent in (50, 95)},
        **{
            f"{each}_tokens": int(sums.count(f"{each}_tokens")) for each in ("prompt", "visual", "completion")
        },
        "cost_per_request": None if cost is None else cost / MICRO,
        "rating": sums.rating,
        "ratings": sums.ratings,
    }


def without_infinity(value: Any) -> Any:
    """A copy that JSON can hold: numbers that are not finite become None, tuples become lists."""
    if isinstance(value, dict):
        return {name: without_infinity(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinity(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
