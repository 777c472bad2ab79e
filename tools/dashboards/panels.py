"""The panels of the dashboards, in one style: a unit, a description and a legend for each."""

from __future__ import annotations

from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, gauge, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
SERVERS = 'job=~"$job", instance=~"$instance"'
"""Matches the servers that are chosen at the top of a dashboard."""
HEIGHT = 8
RATE = "[$__rate_interval]"
AnyPanel = timeseries.Panel | stat.Panel | gauge.Panel | heatmap.Panel


class Query(NamedTuple):
    """One expression of a panel. legend: name of its series; {{label}} is the value of a label."""

    expression: str
    legend: str


class Unit:
    """The units of panels, by Grafana's ids."""

    SECONDS = "s"
    MILLISECONDS = "ms"
    BYTES = "bytes"
    SHARE = "percentunit"
    REQUESTS = "reqps"
    PER_SECOND = "cps"
    COUNT = "short"
    HOURS = "h"
    MONEY = "none"


def lines(
    title: str,
    text: str,
    unit: str,
    *queries: Query,
    stacked: bool = False,
    most: float | None = None,
    span: int = 8,
) -> timeseries.Panel:
    """Return a panel of lines over time. stacked: as areas on top of each other. most: top of the axis."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .unit(unit)
        .datasource(SOURCE)
        .min(0)
        .height(HEIGHT)
        .span(span)
        .fill_opacity(40 if stacked else 8)
        .show_points(kinds.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(kinds.LegendDisplayMode.TABLE)
            .placement(kinds.LegendPlacement.BOTTOM)
            .calcs(["mean", "lastNotNull"])
        )
        .tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI))
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A"))
    if most is not None:
        panel.max(most)
    for at, query in enumerate(queries):
        panel.with_target(_target(query, at))
    return panel


def numbers(title: str, text: str, unit: str, *queries: Query, span: int = 4, **levels: float) -> stat.Panel:
    """Return a panel of single numbers with their names. levels: `warn` and `bad`, where colours change."""
    panel = (
        stat.Panel()
        .title(title)
        .description(text)
        .unit(unit)
        .datasource(SOURCE)
        .height(HEIGHT)
        .span(span)
        .text_mode(kinds.BigValueTextMode.VALUE_AND_NAME)
        .graph_mode(kinds.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_levels(**levels))
    )
    for at, query in enumerate(queries):
        panel.with_target(_target(query, at))
    return panel


def dial(title: str, text: str, unit: str, *queries: Query, span: int = 4, **levels: float) -> gauge.Panel:
    """Return a panel of dials from 0 to 1. levels: `warn` and `bad`, where colours change."""
    panel = (
        gauge.Panel()
        .title(title)
        .description(text)
        .unit(unit)
        .min(0)
        .max(1)
        .datasource(SOURCE)
        .height(HEIGHT)
        .span(span)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_levels(**levels))
    )
    for at, query in enumerate(queries):
        panel.with_target(_target(query, at))
    return panel


def buckets(title: str, text: str, unit: str, metric: str, span: int = 8) -> heatmap.Panel:
    """Return a heat map of a histogram: how often which bucket was hit. unit: of the values."""
    expression = f"sum by (le) (increase({metric}_bucket{{{SERVERS}}}{RATE}))"
    return (
        heatmap.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .height(HEIGHT)
        .span(span)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .cell_values(heatmap.CellValues().unit(Unit.COUNT))
        .unit(Unit.COUNT)
        .color(heatmap.HeatmapColorOptions().scheme("Oranges").steps(32))
        .show_legend()
        .with_target(_target(Query(expression, "{{le}}"), 0).format(PromQueryFormat.HEATMAP))
    )


def quantiles(metric: str, by: str = "", where: str = SERVERS, shares: tuple[float, ...] = ()) -> list[Query]:
    """Return a query for each quantile of a histogram. by: a label that stays apart."""
    labels = f"{by}, le" if by else "le"
    name = f"{{{{{by}}}}} " if by else ""
    return [
        Query(
            f"histogram_quantile({share:g}, sum by ({labels}) (rate({metric}_bucket{{{where}}}{RATE})))",
            f"{name}P{share * 100:g}",
        )
        for share in shares or (0.5, 0.95, 0.99)
    ]


def mean(metric: str, legend: str, by: str = "", where: str = SERVERS) -> Query:
    """Return the query of the mean of a histogram."""
    own = f" by ({by})" if by else ""
    total, count = (f"sum{own} (rate({metric}_{part}{{{where}}}{RATE}))" for part in ("sum", "count"))
    return Query(f"{total} / {count}", legend)


def rate(metric: str, legend: str, by: str = "", where: str = SERVERS) -> Query:
    """Return the query of a counter's growth per second, over all chosen servers."""
    own = f" by ({by})" if by else ""
    return Query(f"sum{own} (rate({metric}{{{where}}}{RATE}))", legend)


def gauge_of(metric: str, legend: str = "{{instance}}", where: str = SERVERS) -> Query:
    """Return the query of a gauge, by instance."""
    return Query(f"{metric}{{{where}}}", legend)


def _target(query: Query, at: int) -> prometheus.Dataquery:
    reference = chr(ord("A") + at)
    target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(reference)
    return target.datasource(SOURCE).range()


def _levels(warn: float | None = None, bad: float | None = None) -> dashboard.ThresholdsConfig:
    steps = [models.Threshold(value=None, color="green")]
    if warn is not None:
        steps.append(models.Threshold(value=warn, color="orange"))
    if bad is not None:
        steps.append(models.Threshold(value=bad, color="red"))
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
