"""Charts of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fovea.bench.run import WorkloadResult
from fovea.core.errors import ConfigError, Unavailable
from fovea.core.names import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
PERCENTILES = ("p50", "p95", "p99")


def check_plot(path: Path) -> None:
    """Check before a long measurement that a chart can be drawn.

    Raises ConfigError for a file type that is not accepted, Unavailable if matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(
            f"--plot is {str(path)!r}; accepted: a name that ends in {', '.join(FORMATS)}", param="plot"
        )
    figure(1, 1)


def draw(path: Path, results: Sequence[WorkloadResult], title: str) -> None:
    """Draw four charts into one file.

    They show the distributions of the time to first token and of the gaps, the rates as bars, and the
    distribution of the end-to-end time. If an open loop ran at several rates, the last chart shows
    percentiles over these rates instead.

    Raises ConfigError if the file cannot be written.
    """
    chart = figure(12.8, 9.2)
    chart.suptitle(title)
    first, gaps, rates, ends = chart.subplots(2, 2).flat
    for result in results:
        answers = [s for part in result.rounds for s in part.samples if s.succeeded]
        _shares(first, [sample.ttft for sample in answers], result.name)
        _shares(gaps, [gap for sample in answers for gap in sample.gaps], result.name)
    _label(first, "first token", "ms", "share of requests")
    _label(gaps, "gaps between pieces of text", "ms", "share of gaps")
    _bars(rates, results)
    open_loops = [result for result in results if result.name.startswith("open ")]
    if len(open_loops) > 1:
        _over_rates(ends, open_loops)
    else:
        for result in results:
            answers = [s for part in result.rounds for s in part.samples if s.succeeded]
            _shares(ends, [sample.end_to_end for sample in answers], result.name)
        _label(ends, "whole answer", "ms", "share of requests")
    save(chart, path)


def save(chart: Figure, path: Path) -> None:
    """Write a chart to a file. Raises ConfigError if it cannot be written."""
    try:
        chart.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", param="plot") from error


def figure(width: float, height: float) -> Figure:
    """Create an empty figure; width and height in inches.

    It does without pyplot, which would open a window and keep global state. Raises Unavailable without
    matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unavailable(
            f"charts need matplotlib, which is not installed: {install_command('bench')}",
            code="plot_unavailable",
        ) from error
    return Figure(figsize=(width, height), layout="constrained", dpi=110)


def _shares(axes: Any, seconds: Sequence[float], name: str) -> None:
    """Plot the cumulative distribution of durations, in milliseconds.

    Values of 0 are left out, because the axis is logarithmic.
    """
    values = sorted(value * 1e3 for value in seconds if value > 0)
    if values:
        axes.step(values, [(rank + 1) / len(values) for rank in range(len(values))], where="post", label=name)


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.set_xscale("log")
        _plain_numbers(axes.xaxis)
        axes.legend(fontsize="small")


def _plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with 1, 2, 5, 10 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _bars(axes: Any, results: Sequence[WorkloadResult]) -> None:
    """Draw the tokens per second of each result, with the slowest and the fastest round as error bars."""
    for place, result in enumerate(results):
        summary = result.summary
        spread = [
            [max(0.0, summary.tokens_per_s - summary.tokens_per_s_low)],
            [max(0.0, summary.tokens_per_s_high - summary.tokens_per_s)],
        ]
        axes.bar(place, summary.tokens_per_s, yerr=spread, capsize=3)
    axes.set_xticks(range(len(results)), [result.name for result in results], rotation=30, ha="right")
    axes.set_title("output tokens per second")
    axes.grid(alpha=0.3, axis="y")


def _over_rates(axes: Any, results: Sequence[WorkloadResult]) -> None:
    rates = [float(result.name.removeprefix("open ").removesuffix("/s")) for result in results]
    for percentile in PERCENTILES:
        axes.plot(
            rates,
            [getattr(result.summary.ttft, percentile) for result in results],
            marker="o",
            label=f"TTFT {percentile}",
        )
    axes.set_title("first token over the rate of requests")
    axes.set_xlabel("requests per second")
    axes.set_ylabel("ms")
    axes.set_yscale("log")
    _plain_numbers(axes.yaxis)
    axes.grid(alpha=0.3)
    good = axes.twinx()
    good.plot(
        rates, [result.summary.goodput for result in results], color="black", linestyle="--", label="goodput"
    )
    good.set_ylabel("good requests per second")
    good.set_ylim(bottom=0)
    lines = [handles for one in (axes, good) for handles in one.get_legend_handles_labels()[0]]
    axes.legend(lines, [line.get_label() for line in lines], fontsize="small")
