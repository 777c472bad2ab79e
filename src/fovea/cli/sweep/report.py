"""A sweep as Markdown with aligned columns, for terminals and documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fovea.evaluation.score import PairedCounts
from fovea.evaluation.sweep import ALL, FULL, Score, Setting, Sweep

DIFFERENCES = (
    "Differences in accuracy between two settings on the same questions, first minus second, in points, "
    "with 95% intervals (Newcombe, paired) and the p-value of McNemar's exact test"
)


def markdown(sweep: Sweep) -> str:
    """Return tables of accuracy, tokens and times per setting, of accuracy per kind, and of comparisons."""
    parts = [
        table(_settings(sweep)),
        f"Times are medians of {sweep.time(FULL).requests} requests, {sweep.timed_on}.",
    ]
    shares = dict.fromkeys(setting.keep for setting in sweep.settings if setting != FULL)
    for keep in shares:
        parts += [f"Per kind, {keep:g} of the tokens kept:", table(_kinds(sweep, keep))]
    if sweep.pairs:
        parts += [f"{DIFFERENCES}:", table(_pairs(sweep))]
    return "\n\n".join(parts)


def table(entries: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. The first row is the head."""
    rows = list(entries)
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(rows[0]))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def points(low: float, high: float) -> str:
    """Return an interval of accuracies in percent."""
    return f"{100 * low:.1f} - {100 * high:.1f}"


def _settings(sweep: Sweep) -> Iterator[list[str]]:
    yield [
        "setting", *(f"{group}, % (95%)" for group in sweep.groups),
        "visual tokens", "TTFT, ms", "preprocess", "encoder", "prefill",
    ]  # fmt: skip
    for setting in sweep.settings:
        scores = [sweep.score(setting, group) for group in sweep.groups]
        timed = sweep.time(setting)
        times = timed.ttft, timed.preprocess, timed.encode, timed.prefill
        yield [
            setting.name,
            *map(_accuracy, scores),
            f"{scores[-1].tokens:.0f}",
            *(f"{1e3 * seconds:.1f}" for seconds in times),
        ]


def _kinds(sweep: Sweep, keep: float) -> Iterator[list[str]]:
    shown: list[Setting] = [FULL, *(one for one in sweep.settings if one != FULL and one.keep == keep)]
    yield ["kind", *(setting.method or FULL.name for setting in shown)]
    for kind in (*sweep.kinds, ALL):
        scores = [sweep.score(setting, kind) for setting in shown]
        yield [kind, *(f"{100 * score.accuracy:.1f}" for score in scores)]


def _pairs(sweep: Sweep) -> Iterator[list[str]]:
    yield ["first", "second", *sweep.groups]
    for pair in sweep.pairs:
        compared = [sweep.compare(*pair, group).counts for group in sweep.groups]
        yield [*(setting.name for setting in pair), *map(difference, compared)]


def difference(paired: PairedCounts) -> str:
    """Return a difference of accuracies in points, with its interval and p value.

    A p value that would be rounded to 0.000 is shown as "p < 0.001".
    """
    low, high = (100 * end for end in paired.interval)
    p = f"{paired.p_value:.3f}"
    shown = "p < 0.001" if p == "0.000" else f"p {p}"
    return f"{100 * paired.difference:+.1f} ({low:+.1f} to {high:+.1f}), {shown}"


def _accuracy(score: Score) -> str:
    return f"{100 * score.accuracy:.1f} ({points(score.low, score.high)})"
