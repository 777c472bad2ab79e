"""What the table shows: rows of figures, where each comes from, and what is wanted of Fovea."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Round = Mapping[str, Any]
"""One engine's round of a workload, as measure.py writes it."""


@dataclass(frozen=True)
class Target:
    """limit: at most or at least so many times the figure of `of`: "best" is the best peer of the row, "absolute" makes
    the limit the figure itself, else an engine's name."""

    limit: float
    of: str = "best"


@dataclass(frozen=True)
class Row:
    """workload: of `fovea bench`. figure: of a round. unit: beside it. lower: whether less is better.
    targets: by precision."""

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
    read = {at: (Target(said),) if isinstance(said, float) else said for at, said in targets.items()}
    return Row(name, title, workload, figure, unit, lower, read)


ROWS = (
    _row("cold", "first token, one request, new image", "cold", "ttft_ms", "ms", True, bf16=0.85, int8=0.65),
    _row("decode", "decode, one request", "cold", "decode_per_s", "tok/s", False,
         bf16=(Target(1.4, "vllm"), Target(0.95, "llamacpp")), int8=1.3, int4=1.1),
    _row("images", "8 at once, 8 new images", "images", "tokens_per_s", "tok/s", False, bf16=1.25, int8=1.6),
    _row("questions", "8 questions at once, one new image", "questions", "tokens_per_s", "tok/s", False, bf16=1.3),
    _row("followup", "follow-up question: first token", "followup", "ttft_ms", "ms", True, bf16=0.6),
    _row("known", "known image behind new text: first token", "known", "ttft_ms", "ms", True, bf16=0.5),
    _row("text", "8 at once, text only", "text", "tokens_per_s", "tok/s", False, bf16=1.3),
    _row("stall", "longest gap of a stream while an 896x896 image arrives", "stall", "stall_ms", "ms", True,
         bf16=(Target(150.0, "absolute"),)),
    _row("stalling", "... and that image's first token", "stall", "ttft_ms", "ms", True),
    _row("memory", "peak memory", "memory", "peak_mib", "MiB", True),
)  # fmt: skip
MEMORY_FACTOR = 1.3
"""Target of the row memory: at most so many times the checkpoint, plus the pools that were configured."""


@dataclass(frozen=True)
class Figure:
    """Median, lowest and highest of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values))


def figures(row: Row, engines: Mapping[str, Mapping[str, Any]]) -> dict[str, Figure]:
    """Of the engines that have any; a round in which a request failed does not count."""
    found = {}
    for name, engine in engines.items():
        rounds: list[Round] = engine.get("rounds", {}).get(row.workload, [])
        values = [part[row.figure] for part in rounds if not part["failed"] and part[row.figure] is not None]
        if values:
            found[name] = Figure.of(values)
    return found


def best_peer(row: Row, found: Mapping[str, Figure]) -> str | None:
    peers = [name for name in found if name != "fovea"]
    pick = min if row.lower else max
    return pick(peers, key=lambda name: found[name].median) if peers else None


@dataclass(frozen=True)
class Verdict:
    """met: none where Fovea or what it is compared with has no figure."""

    words: str
    met: bool | None


def verdicts(
    row: Row, precision: str, found: Mapping[str, Figure], limits_mib: float = math.nan
) -> list[Verdict]:
    """limits_mib: of the row memory."""
    sign = "at most" if row.lower else "at least"
    if row.name == "memory" and precision == "bf16":
        known = "" if math.isnan(limits_mib) else f" ({limits_mib:,.0f})"
        words = f"{sign} {MEMORY_FACTOR:g}x the checkpoint and the pools{known}"
        return [Verdict(words, _met(row, found, limits_mib))]
    said = []
    for target in row.targets.get(precision, ()):
        if target.of == "absolute":
            said.append(Verdict(f"{sign} {target.limit:g} {row.unit}", _met(row, found, target.limit)))
            continue
        peer = best_peer(row, found) if target.of == "best" else target.of
        other = found[peer].median if peer in found else math.nan
        name = "best" if target.of == "best" else target.of
        said.append(Verdict(f"{sign} {target.limit:g}x {name}", _met(row, found, target.limit * other)))
    return said


def _met(row: Row, found: Mapping[str, Figure], limit: float) -> bool | None:
    if "fovea" not in found or math.isnan(limit):
        return None
    ours = found["fovea"].median
    return ours <= limit if row.lower else ours >= limit
