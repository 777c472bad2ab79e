"""Alerts on error budgets: a budget is used up faster than its objective allows.

Each alert compares the burn rate of a long window, so that a short disturbance does not fire it, and that of
a short one, so that it ends soon after the disturbance. The pairs are those of Google's SRE workbook, chapter
5, for a budget of 30 days.
"""

from __future__ import annotations

from typing import NamedTuple

from fovea.deploy.monitoring.rule import Alert, Condition


class Pace(NamedTuple):
    """One pair of windows.

    factor: burn rate above which the alert fires.
    left: time after which a whole budget is used up at that rate, in words.
    """

    name: str
    severity: str
    factor: float
    long: str
    short: str
    hold: str
    left: str


PACES = (
    Pace("FoveaBudgetBurnFastest", "critical", 14.4, "1h", "5m", "2m", "2 days"),
    Pace("FoveaBudgetBurnFast", "critical", 6, "6h", "30m", "5m", "5 days"),
    Pace("FoveaBudgetBurnSlow", "warning", 3, "1d", "2h", "15m", "10 days"),
    Pace("FoveaBudgetBurnSlowest", "info", 1, "3d", "6h", "1h", "30 days"),
)


def burn_alerts() -> list[Alert]:
    """Return the four alerts. Each covers all objectives; the label `slo` names the one that it is about."""
    return [_alert(pace) for pace in PACES]


def _alert(pace: Pace) -> Alert:
    return Alert(
        pace.name,
        pace.severity,
        pace.hold,
        (
            Condition(f"fovea_slo:burn:rate{pace.long}", f"> {pace.factor:g}"),
            Condition(f"fovea_slo:burn:rate{pace.short}", f"> {pace.factor:g}"),
        ),
        "{{ $labels.job }} misses its objective {{ $labels.slo }}",
        "The error budget of {{ $labels.slo }} of {{ $labels.job }} is used up "
        '{{ $value | printf "%.1f" }} times as fast as the objective allows, over the last '
        f"{pace.long} and the last {pace.short}. At {pace.factor:g} times, a whole budget of 30 days lasts "
        f"{pace.left}.",
    )
