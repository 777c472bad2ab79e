"""Objectives: what is missed, how fast budgets are used up, and what is left of them."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards.page import SLO_LABELS, Row, page
from tools.dashboards.panels import Query, Unit, lines, numbers

OF = 'job=~"$job", slo=~"$slo"'
NAMES = "{{job}} {{slo}}"
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")


def slo() -> Dashboard:
    """Return the dashboard."""
    return page(
        "slo",
        "Fovea: objectives",
        "Whether the service keeps its objectives, and how long its error budgets will last.",
        SLO_LABELS,
        [_budgets(), _burn(), _latency()],
    )


def _budgets() -> Row:
    return (
        "Budgets of 30 days",
        [
            numbers(
                "Budget left",
                "Part of the error budget of the last 30 days that is left. Below 0 the objective is "
                "missed. With less than 30 days of data, the days that exist count.",
                Unit.SHARE, Query(f"fovea_slo:budget_left:ratio30d{{{OF}}}", NAMES), span=12,
            ),
            lines(
                "Budget left over time", "It falls fast during an incident, and rises as old days leave.",
                Unit.SHARE, Query(f"fovea_slo:budget_left:ratio30d{{{OF}}}", NAMES), span=12,
            ),
            numbers(
                "Ready", "1: at least one server of the job is ready. Empty in a first start.", Unit.COUNT,
                Query('fovea_slo:ready:bool{job=~"$job"}', "{{job}}"), span=8,
            ),
            numbers(
                "Objectives", "Share of requests, or of time, that may miss each objective.", Unit.SHARE,
                Query('fovea_slo:budget:ratio{slo=~"$slo"}', "{{slo}}"), span=16,
            ),
        ],
    )  # fmt: skip


def _burn() -> Row:
    panels = [
        lines(
            f"Burn rate of {window}",
            "How many times as fast as allowed the budget is used up. At 1 it lasts 30 days.",
            "none", Query(f"fovea_slo:burn:rate{window}{{{OF}}}", NAMES),
        )
        for window in WINDOWS
    ]  # fmt: skip
    missed = lines(
        "Missed share of 5 minutes", "Share of requests, or of time, that missed the objective.", Unit.SHARE,
        Query(f"fovea_slo:bad:ratio5m{{{OF}}}", NAMES),
    )  # fmt: skip
    counted = lines(
        "Requests that objectives count", "Per second. Without requests there is nothing to miss.",
        Unit.REQUESTS, Query(f"fovea_slo:all:rate5m{{{OF}}}", NAMES),
    )  # fmt: skip
    return "Burn rates", [*panels, missed, counted]


def _latency() -> Row:
    def recorded(kind: str) -> list[Query]:
        return [
            Query(f'fovea_{kind}:seconds:{name}_5m{{job=~"$job"}}', f"{{{{job}}}} {name.upper()}")
            for name in ("p50", "p95", "p99")
        ]

    target = "Target of {{slo}}"
    return (
        "Latency and its targets",
        [
            lines(
                "Time of a request", "Quantiles of 5 minutes, and the targets.", Unit.SECONDS,
                *recorded("latency"), Query('fovea_slo:target:seconds{slo=~"latency.*"}', target), span=12,
            ),
            lines(
                "Time to the first token", "Quantiles of 5 minutes, and the target.", Unit.SECONDS,
                *recorded("ttft"), Query('fovea_slo:target:seconds{slo="ttft"}', target), span=12,
            ),
            lines(
                "Traffic", "Requests per second of the last 5 minutes.", Unit.REQUESTS,
                Query('fovea_rate:requests:per_second5m{job=~"$job"}', "{{job}}"),
            ),
            lines(
                "Tokens", "Tokens per second of the last 5 minutes.", Unit.PER_SECOND,
                Query('fovea_rate:tokens:per_second5m{job=~"$job"}', "{{job}} {{kind}}"),
            ),
            lines(
                "Images", "Images per second of the last 5 minutes.", Unit.PER_SECOND,
                Query('fovea_rate:images:per_second5m{job=~"$job"}', "{{job}}"),
            ),
        ],
    )  # fmt: skip
