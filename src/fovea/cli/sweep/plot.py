"""A sweep as a chart: accuracy against visual tokens kept, and against the time to the first token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fovea.bench.plot import figure, save
from fovea.evaluation.sweep import ALL, FULL, RELEVANCE, Setting, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Lines = Mapping[str, Sequence[Setting]]
"""The settings of each method, from all tokens downwards."""


def draw(path: Path, sweep: Sweep, title: str) -> None:
    """Draw a line per method: accuracy over the tokens kept, for small details and all kinds, and over TTFT.

    Raises ConfigError when the file cannot be written.
    """
    lines = _lines(sweep)
    groups = tuple(dict.fromkeys((sweep.groups[0], ALL)))
    chart = figure(5.4 * (len(groups) + 1), 6.4)
    chart.suptitle(title)
    *kept, times = chart.subplots(1, len(groups) + 1)
    for axes, group in zip(kept, groups, strict=True):
        _panel(axes, sweep, group, lines, lambda setting: 100 * setting.keep)
        axes.set_xlabel("visual tokens kept, %")
    _panel(times, sweep, ALL, lines, lambda setting: 1e3 * sweep.time(setting).ttft)
    times.set_xlabel(f"time to the first token, ms ({sweep.timed_on})")
    chart.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    save(chart, path)


def _lines(sweep: Sweep) -> Lines:
    lines: dict[str, list[Setting]] = {}
    for setting in sweep.settings:
        if setting.method is not None:
            lines.setdefault(setting.method, [FULL]).append(setting)
    return {method: sorted(settings, key=lambda setting: -setting.keep) for method, settings in lines.items()}


def _panel(axes: Axes, sweep: Sweep, group: str, lines: Lines, x: Callable[[Setting], float]) -> None:
    from matplotlib import colormaps

    colours = [colormaps["tab20"](place) for place in (*range(0, 20, 2), *range(1, 20, 2))]  # dark ones first
    for place, (method, settings) in enumerate(lines.items()):
        scores = [sweep.score(setting, group) for setting in settings]
        values = [100 * score.accuracy for score in scores]
        style: dict[str, Any] = {"linewidth": 1.2, "color": colours[place % len(colours)]}
        if method == RELEVANCE:
            style = {"linewidth": 2.6, "color": "black", "zorder": 5}
            spread = [
                [value - 100 * score.low for value, score in zip(values, scores, strict=True)],
                [100 * score.high - value for value, score in zip(values, scores, strict=True)],
            ]
            axes.errorbar(
                [x(setting) for setting in settings], values, spread, fmt="none", color="black", capsize=3
            )
        axes.plot([x(setting) for setting in settings], values, marker="o", label=method, **style)
    axes.set_title(group if group != ALL else "all kinds")
    axes.set_ylabel("right answers, %")
    axes.grid(alpha=0.3)
