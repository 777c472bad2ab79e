"""The rows of the results table: where each figure comes from, and the targets for Fovea."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from instructions import ALL, AMX, AVX2

Round = Mapping[str, Any]
"""One round of a workload with one engine, as measure.py writes it."""


@dataclass(frozen=True)
class Target:
    """A bound for Fovea's figure.

    limit: factor of the figure of `of`.
    of: "best" for the best peer of the row, or the name of an engine. With "absolute", `limit` is the bound
        itself.
    """

    limit: float
    of: str = "best"


@dataclass(frozen=True)
class Row:
    """A row of the table.

    name: short name in this code.
    title: text in the table.
    workload: workload of `fovea bench`.
    figure: key of the figure in a round.
    unit: unit of the figure.
    lower: whether less is better.
    targets: the targets of each precision.
    """

    name: str
    title: str
    workload: str
    figure: str
    unit: str
    lower: bool
    targets: Mapping[str, tuple[Target, ...]]


def _row(
    name: str,
    title: str,
    workload: str,
    figure: str,
    unit: str,
    lower: bool,
    **targets: float | tuple[Target, ...],
) -> Row:
    by_precision = {
        precision: (Target(target),) if isinstance(target, float) else target
        for precision, target in targets.items()
    }
    return Row(name, title, workload, figure, unit, lower, by_precision)


ROWS = (
    _row("cold", "first token, one request, new image", "cold", "ttft_ms", "ms", True, bf16=0.85, int8=0.65),
    _row("decode", "decode, one request", "cold", "decode_per_s", "tok/s", False,
         bf16=(Target(1.4, "vllm"), Target(0.95, "llamacpp")), int8=1.3, int4=1.1),
    _row("images", "8 at once, 8 new images", "images", "tokens_per_s", "tok/s", False, bf16=1.25, int8=1.6),
    _row("questions", "8 questions at once, one new image", "questions", "tokens_per_s", "tok/s", False,
         bf16=1.3),
    _row("followup", "follow-up question: first token", "followup", "ttft_ms", "ms", True, bf16=0.6),
    _row("known", "known image after new text: first token", "known", "ttft_ms", "ms", True, bf16=0.5),
    _row("text", "8 at once, text only", "text", "tokens_per_s", "tok/s", False, bf16=1.3),
    _row("stall", "longest gap of a stream while an 896x896 image arrives", "stall", "stall_ms", "ms", True,
         bf16=(Target(150.0, "absolute"),)),
    _row("stalling", "first token of that image", "stall", "ttft_ms", "ms", True),
    _row("memory", "peak memory", "memory", "peak_mib", "MiB", True),
)  # fmt: skip
MEMORY_FACTOR = 1.3
"""Target of the row `memory`: at most this factor times the checkpoint, plus the configured caches."""


@dataclass(frozen=True)
class Figure:
    """Median, lowest and highest figure of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values))


def figures(row: Row, engines: Mapping[str, Mapping[str, Any]]) -> dict[str, Figure]:
    """The row's figure of each engine that has one; rounds in which a request failed do not count."""
    by_engine = {}
    for name, engine in engines.items():
        rounds: list[Round] = engine.get("rounds", {}).get(row.workload, [])
        values = [part[row.figure] for part in rounds if not part["failed"] and part[row.figure] is not None]
        if values:
            by_engine[name] = Figure.of(values)
    return by_engine


def best_peer(row: Row, by_engine: Mapping[str, Figure]) -> str | None:
    peers = [name for name in by_engine if name != "fovea"]
    pick = min if row.lower else max
    return pick(peers, key=lambda name: by_engine[name].median) if peers else None


@dataclass(frozen=True)
class Verdict:
    """A target in words, and whether it is met.

    met: None if Fovea or the engine that it is compared with has no figure.
    """

    words: str
    met: bool | None


def verdicts(
    row: Row,
    precision: str,
    by_engine: Mapping[str, Figure],
    limit_mib: float = math.nan,
    instructions: str = ALL,
) -> list[Verdict]:
    """Judge the row's targets.

    limit_mib: limit of the row `memory`, in MiB.
    instructions: name of the page, `all`, `avx2` or `amx`.
    """
    if instructions in (AVX2, AMX):
        return [_first(row, by_engine)]
    sign = "at most" if row.lower else "at least"
    if row.name == "memory" and precision == "bf16":
        number = "" if math.isnan(limit_mib) else f" ({limit_mib:,.0f})"
        words = f"{sign} {MEMORY_FACTOR:g}x the checkpoint, plus the configured caches{number}"
        return [Verdict(words, _met(row, by_engine, limit_mib))]
    results = []
    for target in row.targets.get(precision, ()):
        if target.of == "absolute":
            results.append(Verdict(f"{sign} {target.limit:g} {row.unit}", _met(row, by_engine, target.limit)))
            continue
        peer = best_peer(row, by_engine) if target.of == "best" else target.of
        other = by_engine[peer].median if peer in by_engine else math.nan
        name = "the best peer" if target.of == "best" else target.of
        met = _met(row, by_engine, target.limit * other)
        results.append(Verdict(f"{sign} {target.limit:g}x {name}", met))
    return results


def _first(row: Row, by_engine: Mapping[str, Figure]) -> Verdict:
    """The target of every row on the pages of AVX2 and AMX: better than all peers."""
    peer = best_peer(row, by_engine)
    if peer is None or "fovea" not in by_engine:
        return Verdict("first", None)
    ours, other = by_engine["fovea"].median, by_engine[peer].median
    return Verdict("first", ours < other if row.lower else ours > other)


def _met(row: Row, by_engine: Mapping[str, Figure], limit: float) -> bool | None:
    if "fovea" not in by_engine or math.isnan(limit):
        return None
    ours = by_engine["fovea"].median
    return ours <= limit if row.lower else ours >= limit
