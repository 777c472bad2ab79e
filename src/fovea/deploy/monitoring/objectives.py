"""The objectives of a service, and the rules by which Prometheus records how they are met.

    Record, Alert, Group    rules as values; `rules_text` writes them
    Targets, Objective      how fast and how reliable a service has to be
    recording_groups        rates, quantiles, and how fast each objective uses its error budget
    alert_groups            all alerts, which `alerts.yml` lists

For every objective and window there is one series, the share of requests (or of time) that missed it:

    fovea_slo:bad:ratio1h{slo="latency_p95", job="fovea"}

Windows up to 6 hours are computed from the counters. Longer ones would read millions of samples, so they are
sums of the recorded 5-minute rates. Both are weighted by traffic: an hour at night counts as little as it had
requests. Servers and gateways have different names of metrics, and different jobs. So each rule is `servers
or gateways`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting
from fovea.observe.table import SECONDS

WIDTH = 110
"""Columns of a rules file. Long expressions are folded."""


class Record(NamedTuple):
    """A recording rule: its result is stored as a series.

    name: of the new series.
    labels: that it gets, beside those of the result.
    text: what the series says, for the documentation.
    """

    name: str
    expression: str
    labels: Mapping[str, str] = {}
    text: str = ""


class Condition(NamedTuple):
    """A part of an alert: an expression, and what its value is compared with.

    value: PromQL; it returns a series on every healthy server, unless a metric is missing.
    test: comparison operator and its right side.
    """

    value: str
    test: str

    def __str__(self) -> str:
        return f"{self.value} {self.test}".strip()


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert. It fires if all conditions have been true for a time.

    hold: duration before it fires, as Prometheus writes it.
    severity: critical: wake somebody up; warning: look at it today; info: good to know.
    conditions: joined by `and`. The value of the first one is the alert's value.
    summary, description: templates of Prometheus.
    """

    name: str
    severity: str
    hold: str
    conditions: tuple[Condition, ...]
    summary: str
    description: str

    @property
    def expression(self) -> str:
        """The whole PromQL expression."""
        return " and ".join(str(condition) for condition in self.conditions)

    @property
    def anchor(self) -> str:
        """Anchor of the alert's heading in the runbooks."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated one after another, so that later ones see the results of earlier ones.

    interval: time between two evaluations, as Prometheus writes it; "": the global setting.
    """

    name: str
    rules: Sequence[Record | Alert]
    interval: str = ""


def alert_groups(targets: Targets | None = None) -> list[Group]:
    """Return the groups of alerts. targets: None: the defaults."""
    import yaml  # every command of fovea imports this file, and few need it

    targets = targets or Targets()
    text = Path(__file__).with_name("alerts.yml").read_text(encoding="utf-8")
    return [
        Group(name, [_read_alert(entry, targets) for entry in entries])
        for name, entries in yaml.safe_load(text).items()
    ]


def _read_alert(entry: Mapping[str, Any], targets: Targets) -> Alert:
    conditions = tuple(
        Condition(condition["value"], condition["test"].replace("QUEUE_S", f"{targets.queue_s:g}"))
        for condition in entry["conditions"]
    )
    return Alert(**{**entry, "conditions": conditions})


def rules_text(groups: Sequence[Group], runbooks: str, head: str) -> str:
    """Return a rules file.

    runbooks: address of the page of runbooks, without an anchor.
    head: lines of the comment at its top.
    """
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    return comment + as_yaml({"groups": [_group(group, runbooks) for group in groups]})


def as_yaml(value: Any) -> str:
    """Return a value as YAML, its keys in their order."""
    import yaml

    return yaml.safe_dump(value, sort_keys=False, width=WIDTH, allow_unicode=True)


def _group(group: Group, runbooks: str) -> dict[str, Any]:
    interval = {"interval": group.interval} if group.interval else {}
    return {
        "name": group.name,
        **interval,
        "rules": [
            _record(rule) if isinstance(rule, Record) else _alert(rule, runbooks) for rule in group.rules
        ],
    }


def _record(rule: Record) -> dict[str, Any]:
    labels = {"labels": dict(rule.labels)} if rule.labels else {}
    return {"record": rule.name, "expr": rule.expression, **labels}


def _alert(alert: Alert, runbooks: str) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.hold,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": f"{runbooks}#{alert.anchor}",
        },
    }


class Objective(NamedTuple):
    """One objective, and the share of requests or of time that may miss it.

    slo: name; the value of the label `slo`.
    budget: share that may miss it, above 0 and below 1.
    seconds: target of time; 0: the objective has none.
    text: the objective as a sentence.
    """

    slo: str
    budget: float
    seconds: float
    text: str


_TIMES: dict[str, Any] = {"low": 0.005, "high": 120, "or_zero": True}


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets from which recording rules and alerts are written.

    The defaults are for models and machines of which nothing is known, so they find only what is very slow.
    """

    availability: float = setting(
        0.999, "Share of the time in which at least one server of a job is ready.", low=0.5, high=0.99999
    )
    success: float = setting(
        0.999, "Share of requests that do not end with a status of 500 or more.", low=0.5, high=0.99999
    )
    p50_s: float = setting(30.0, "Seconds within which half of the requests end; 0: no objective.", **_TIMES)
    p95_s: float = setting(120.0, "Seconds within which 95% of the requests end; 0: no objective.", **_TIMES)
    p99_s: float = setting(120.0, "Seconds within which 99% of the requests end; 0: no objective.", **_TIMES)
    ttft_s: float = setting(
        10.0, "Seconds within which 95% of the first tokens come; 0: no objective. Only servers measure it.",
        **_TIMES,
    )  # fmt: skip
    itl_s: float = setting(
        0.5, "Seconds within which 95% of the further tokens come, each after the one before; 0: no "
        "objective. Only servers measure it.", **_TIMES,
    )  # fmt: skip
    queue_s: float = setting(
        30.0, "Seconds that the oldest request may wait in a server's queue.", low=1, high=3600
    )

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("p50_s", "p95_s", "p99_s", "ttft_s", "itl_s"):
            seconds = getattr(self, name)
            if seconds and seconds not in SECONDS:
                bounds = ", ".join(f"{bound:g}" for bound in SECONDS)
                raise ConfigError(
                    f"{name} is {seconds:g}; accepted: 0, or a bound of the histograms' buckets ({bounds})",
                    param=name,
                )

    def objectives(self) -> Iterator[Objective]:
        """Yield all objectives, without those whose target is 0."""
        yield Objective(
            "availability",
            _rest(self.availability),
            0.0,
            f"at least one server is ready in {self.availability:.6g} of the time",
        )
        yield Objective(
            "errors",
            _rest(self.success),
            0.0,
            f"{self.success:.6g} of the requests end without a status of 500 or more",
        )
        for name, share, seconds in (
            ("latency_p50", 0.5, self.p50_s),
            ("latency_p95", 0.95, self.p95_s),
            ("latency_p99", 0.99, self.p99_s),
        ):
            text = f"{share:g} of the requests end within {seconds:g} s"
            if seconds:
                yield Objective(name, _rest(share), seconds, text)
        for name, seconds, tokens in (("ttft", self.ttft_s, "first"), ("itl", self.itl_s, "further")):
            if seconds:
                text = f"0.95 of the {tokens} tokens come within {seconds:g} s"
                yield Objective(name, _rest(0.95), seconds, text)


def _rest(share: float) -> float:
    """Return 1 - share without the noise of binary fractions."""
    return round(1 - share, 9)


SHORT = ("5m", "30m", "1h", "2h", "6h")
LONG = ("1d", "3d", "30d")
TOKENS = ("ttft", "itl")
"""Objectives about tokens. Servers measure them, gateways do not."""
JOBS = 'job=~"fovea.*"'
"""Matches the jobs of servers and gateways. Only `up` needs it: all other names are Fovea's own."""
FIRST_START = "30m"
"""Time in which a job may become ready for the first time."""
ROUTES = 'route=~"/v1/(chat/completions|completions|messages|responses|predict)|/invocations"'
"""Matches the routes that generate answers. Objectives count no others."""
READY = "1 while at least one server of a job is ready, 0 after that; none before a first start has ended"
SERVER, GATEWAY = "fovea:requests_total", "fovea_gateway_requests_total"


def recording_groups(targets: Targets) -> list[Group]:
    """Return the groups of recording rules for these targets."""
    objectives = list(targets.objectives())
    return [
        Group("fovea-objectives", list(_constants(objectives))),
        Group("fovea-rates", list(_rates())),
        Group("fovea-slo", [rule for each in objectives for rule in _short(each)] + list(_burn(SHORT))),
        Group(
            "fovea-slo-long",
            [rule for each in objectives for rule in _long(each)] + [*_burn(LONG[:2]), _left()],
            interval="2m",
        ),
    ]


def _constants(objectives: list[Objective]) -> Iterator[Record]:
    """Yield the budgets and targets as series, so that alerts and dashboards read them from one place."""
    for each in objectives:
        labels = {"slo": each.slo}
        text = "share that may miss the objective"
        yield Record("fovea_slo:budget:ratio", f"vector({each.budget:g})", labels, text)
        if each.seconds:
            text = "target of time in seconds"
            yield Record("fovea_slo:target:seconds", f"vector({each.seconds:g})", labels, text)


def _rates() -> Iterator[Record]:
    """Yield traffic and quantiles of the last 5 minutes, by job."""
    yield Record(
        "fovea_rate:requests:per_second5m",
        _either(f"sum by (job) (rate({SERVER}{{{ROUTES}}}[5m]))", f"sum by (job) (rate({GATEWAY}[5m]))"),
        text="requests for answers per second",
    )
    yield Record(
        "fovea_rate:tokens:per_second5m",
        _either(
            'sum by (job, kind) (rate(fovea:tokens_total{kind=~"prompt|completion"}[5m]))',
            'sum by (job, kind) (rate(fovea_gateway_tokens_total{kind=~"prompt|completion"}[5m]))',
        ),
        text="tokens of prompts and answers per second, by kind",
    )
    yield Record(
        "fovea_rate:images:per_second5m",
        _either(
            "sum by (job) (rate(fovea:images_total[5m]))",
            "sum by (job) (rate(fovea_gateway_images_total[5m]))",
        ),
        text="images of requests per second",
    )
    for quantile, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99")):
        yield Record(
            f"fovea_latency:seconds:{name}_5m",
            f"histogram_quantile({quantile:g}, "
            + _either(
                f"sum by (job, le) (rate(fovea:request_seconds_bucket{{{ROUTES}}}[5m]))",
                "sum by (job, le) (rate(fovea_gateway_request_seconds_bucket[5m]))",
            )
            + ")",
            text=f"duration of requests: {quantile:.0%} are faster",
        )
        yield Record(
            f"fovea_ttft:seconds:{name}_5m",
            f"histogram_quantile({quantile:g}, sum by (job, le) (rate(fovea:ttft_seconds_bucket[5m])))",
            text=f"time to the first token: {quantile:.0%} are faster",
        )


def _short(each: Objective) -> Iterator[Record]:
    """Yield the missed share of one objective over the short windows."""
    labels = {"slo": each.slo}
    share = "share of requests, or of time, that missed the objective"
    if each.slo == "availability":
        yield Record("fovea_slo:ready:bool", _ready(), text=READY)
    for window in SHORT:
        bad, total = _bad(each, window), _all(each, window)
        name = f"fovea_slo:bad:ratio{window}"
        if not total:
            yield Record(name, bad, labels, share)
        elif window == "5m":
            yield Record("fovea_slo:bad:rate5m", bad, labels, "requests per second that missed the objective")
            yield Record(
                "fovea_slo:all:rate5m", total, labels, "requests per second that the objective counts"
            )
            own = f'{{slo="{each.slo}"}}'
            ratio = f"fovea_slo:bad:rate5m{own} / (fovea_slo:all:rate5m{own} > 0)"
            yield Record(name, ratio, labels, share)
        else:
            yield Record(name, f"({bad}) / ({total} > 0)", labels, share)


def _long(each: Objective) -> Iterator[Record]:
    """Yield the missed share of one objective over the long windows, from the recorded rates."""
    own = f'{{slo="{each.slo}"}}'
    for window in LONG:
        if each.slo == "availability":
            ratio = f"1 - avg_over_time(fovea_slo:ready:bool[{window}])"
        else:
            ratio = (
                f"sum_over_time(fovea_slo:bad:rate5m{own}[{window}])"
                f" / (sum_over_time(fovea_slo:all:rate5m{own}[{window}]) > 0)"
            )
        text = "share of requests, or of time, that missed the objective"
        yield Record(f"fovea_slo:bad:ratio{window}", ratio, {"slo": each.slo}, text)


def _burn(windows: tuple[str, ...]) -> Iterator[Record]:
    """Yield the burn rates: 1 uses up the budget of 30 days in 30 days, 14.4 uses 2% of it in an hour."""
    for window in windows:
        yield Record(
            f"fovea_slo:burn:rate{window}",
            f"fovea_slo:bad:ratio{window} / on (slo) group_left () fovea_slo:budget:ratio",
            text="missed share as a multiple of the budget",
        )


def _left() -> Record:
    return Record(
        "fovea_slo:budget_left:ratio30d",
        "1 - fovea_slo:bad:ratio30d / on (slo) group_left () fovea_slo:budget:ratio",
        text="part of the budget of 30 days that is left; below 0: the objective is missed",
    )


def _ready() -> str:
    """Whether at least one server of a job is ready. A server that cannot be scraped is not.

    Before a job is ready for the first time there is no result: weights are downloaded or loaded, which is no
    failure. After FIRST_START without a ready server there is one, so that a start that fails is seen. The
    rule knows by its own series that a job was ready before.
    """
    now = (
        "(max by (job) (fovea:ready) or max by (job) (fovea_gateway_backend_up) "
        f"or max by (job) (up{{{JOBS}}}) * 0)"
    )
    return (
        f"{now} > 0 or {now} and on (job) (present_over_time(fovea_slo:ready:bool[1h]) "
        f"or max by (job) (up{{{JOBS}}} offset {FIRST_START}))"
    )


def _bad(each: Objective, window: str) -> str:
    """Return requests per second that missed an objective. Without any it is 0, not an empty result."""
    if each.slo == "availability":
        return f"1 - avg_over_time(fovea_slo:ready:bool[{window}])"
    if each.slo == "errors":
        failed = _either(
            f'sum by (job) (rate({SERVER}{{{ROUTES}, status=~"5.."}}[{window}]))',
            f'sum by (job) (rate({GATEWAY}{{status=~"5.."}}[{window}]))',
        )
        return f"{failed} or {_all(each, window)} * 0"
    le = f'le="{each.seconds!r}"'
    if each.slo in TOKENS:
        name = f"fovea:{each.slo}_seconds_bucket"
        return f"{_all(each, window)} - sum by (job) (rate({name}{{{le}}}[{window}]))"
    quick = _either(
        f"sum by (job) (rate(fovea:request_seconds_bucket{{{ROUTES}, {le}}}[{window}]))",
        f"sum by (job) (rate(fovea_gateway_request_seconds_bucket{{{le}}}[{window}]))",
    )
    return f"{_all(each, window)} - {quick}"


def _all(each: Objective, window: str) -> str:
    """Return requests per second that an objective counts; "": it counts time."""
    if each.slo == "availability":
        return ""
    if each.slo == "errors":
        return _either(
            f"sum by (job) (rate({SERVER}{{{ROUTES}}}[{window}]))",
            f"sum by (job) (rate({GATEWAY}[{window}]))",
        )
    if each.slo in TOKENS:
        return f"sum by (job) (rate(fovea:{each.slo}_seconds_count[{window}]))"
    return _either(
        f"sum by (job) (rate(fovea:request_seconds_count{{{ROUTES}}}[{window}]))",
        f"sum by (job) (rate(fovea_gateway_request_seconds_count[{window}]))",
    )


def _either(server: str, gateway: str) -> str:
    """Join the expression of servers and that of gateways. They share no job."""
    return f"({server} or {gateway})"
