"""Results as one chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fovea.bench.run import Result
from fovea.core.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
SHARES = ("p50", "p95", "p99")


def check_plot(path: Path) -> None:
    """That a chart can be drawn there, before an hour of measuring. Raises ConfigError or Unavailable."""
    if path.suffix not in FORMATS:
        raise ConfigError(
            f"--plot is {str(path)!r}; accepted: a name that ends in {', '.join(FORMATS)}", param="plot"
        )
    figure(1, 1)


def draw(path: Path, results: Sequence[Result], title: str) -> None:
    """First tokens and gaps as shares of requests, rates as bars; over the rates of an open loop, percentiles as lines.

    Raises ConfigError when the file can not be written.
    """
    chart = figure(12.8, 9.2)
    chart.suptitle(title)
    first, gaps, rates, ends = chart.subplots(2, 2).flat
    for result in results:
        whole = [s for part in result.rounds for s in part.samples if s.whole]
        _shares(first, [sample.ttft for sample in whole], result.name)
        _shares(gaps, [gap for sample in whole for gap in sample.gaps], result.name)
    _label(first, "first token", "ms", "share of requests")
    _label(gaps, "gaps between pieces of text", "ms", "share of gaps")
    _bars(rates, results)
    over = [result for result in results if result.name.startswith("open ")]
    if len(over) > 1:
        _over_rates(ends, over)
    else:
        for result in results:
            whole = [s for part in result.rounds for s in part.samples if s.whole]
            _shares(ends, [sample.end_to_end for sample in whole], result.name)
        _label(ends, "whole answer", "ms", "share of requests")
    save(chart, path)


def save(chart: Figure, path: Path) -> None:
    """Raises ConfigError when the file can not be written."""
    try:
        chart.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} can not be written: {error.strerror}", param="plot") from error


def figure(width: float, height: float) -> Figure:
    """Sides in inches. Without pyplot: no window, no state that outlives the chart. Raises Unavailable."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unavailable(
            "charts need matplotlib, which is not installed here; install it with: pip install 'fovea[bench]'",
            code="plot_unavailable",
        ) from error
    return Figure(figsize=(width, height), layout="constrained", dpi=110)


def _shares(axes: Any, seconds: Sequence[float], name: str) -> None:
    """The share of values up to each, on a logarithmic axis of milliseconds."""
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
    """1, 2, 5, 10 on a logarithmic axis instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _bars(axes: Any, results: Sequence[Result]) -> None:
    """Tokens per second, with the slowest and the fastest round."""
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


def _over_rates(axes: Any, results: Sequence[Result]) -> None:
    asked = [float(result.name.removeprefix("open ").removesuffix("/s")) for result in results]
    for share in SHARES:
        axes.plot(
            asked,
            [getattr(result.summary.ttft, share) for result in results],
            marker="o",
            label=f"TTFT {share}",
        )
    axes.set_title("first token over the rate of requests")
    axes.set_xlabel("requests per second")
    axes.set_ylabel("ms")
    axes.set_yscale("log")
    _plain_numbers(axes.yaxis)
    axes.grid(alpha=0.3)
    good = axes.twinx()
    good.plot(
        asked, [result.summary.goodput for result in results], color="black", linestyle="--", label="goodput"
    )
    good.set_ylabel("good requests per second")
    good.set_ylim(bottom=0)
    lines = [handles for one in (axes, good) for handles in one.get_legend_handles_labels()[0]]
    axes.legend(lines, [line.get_label() for line in lines], fontsize="small")
