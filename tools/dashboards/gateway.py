"""The gateway: who asks, which backend answers and why, what is cached and refused, and what it costs."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards.page import GATEWAY_LABELS, Row, page
from tools.dashboards.panels import (
    RATE,
    SERVERS,
    Query,
    Unit,
    gauge_of,
    lines,
    numbers,
    quantiles,
    rate,
)

OF_MODEL = f'{SERVERS}, model=~"$model"'
REQUESTS = "fovea_gateway_requests_total"


def gateway() -> Dashboard:
    """Return the dashboard."""
    return page(
        "gateway",
        "Fovea: gateway",
        "Which backend gets which request and why, what keeps failing, what tenants use, what caches save, "
        "and what all that costs.",
        GATEWAY_LABELS,
        [_traffic(), _routing(), _backends(), _tenants(), _cache(), _experiments(), _money()],
    )


def _traffic() -> Row:
    failed = f'sum(rate({REQUESTS}{{{OF_MODEL}, status=~"5.."}}{RATE}))'
    return (
        "Traffic",
        [
            lines(
                "Requests by status", "Ended requests per second.", Unit.REQUESTS,
                rate(REQUESTS, "{{status}}", "status", OF_MODEL),
            ),
            lines(
                "Time of a request", "Waiting and all attempts included.", Unit.SECONDS,
                *quantiles("fovea_gateway_request_seconds", where=OF_MODEL),
            ),
            lines(
                "Failed requests", "Share of requests with a status of 500 or more.", Unit.SHARE,
                Query(
                    f"({failed} or vector(0)) / (sum(rate({REQUESTS}{{{OF_MODEL}}}{RATE})) > 0)", "failed"
                ),
            ),
            lines(
                "Requests by model", "As clients name it.", Unit.REQUESTS,
                rate(REQUESTS, "{{model}}", "model", OF_MODEL),
            ),
            lines(
                "Requests by API", "Chat, completions, messages, responses.", Unit.REQUESTS,
                rate(REQUESTS, "{{api}}", "api", OF_MODEL),
            ),
            lines(
                "Refusals", "Requests that the gateway refused, by the code of the error.", Unit.REQUESTS,
                rate("fovea_gateway_refused_total", "{{code}}", "code"),
            ),
        ],
    )  # fmt: skip


def _routing() -> Row:
    return (
        "Routing",
        [
            lines(
                "Why a backend was chosen",
                "Answers by reason. `image` and `prefix`: the backend has the image or the conversation in "
                "its caches. `next`: the first choice was busy or away.",
                Unit.REQUESTS, rate("fovea_gateway_routes_total", "{{reason}}", "reason"), stacked=True,
                span=12,
            ),
            lines(
                "Retries, hedges, fallbacks", "Further attempts per second, by kind.", Unit.REQUESTS,
                rate("fovea_gateway_retries_total", "{{kind}}", "kind"), span=12,
            ),
            lines(
                "Queue", "Requests that wait for a backend.", Unit.COUNT,
                gauge_of("fovea_gateway_queued", "{{model}} {{instance}}", OF_MODEL),
            ),
            lines(
                "Time in the queue", "Of requests that had to wait.", Unit.SECONDS,
                *quantiles("fovea_gateway_waiting_seconds", where=OF_MODEL),
            ),
            lines(
                "Lowered detail", "Requests whose images were sent with fewer visual tokens, because "
                "backends were nearly full.",
                Unit.REQUESTS, rate("fovea_gateway_degraded_total", "degraded"),
            ),
        ],
    )  # fmt: skip


def _backends() -> Row:
    return (
        "Backends",
        [
            lines(
                "Backends that accept requests", "1: the backend gets requests.", Unit.COUNT,
                gauge_of("fovea_gateway_backend_up", "{{backend}} {{instance}}"),
            ),
            lines(
                "Circuit breakers", "1: requests to this stage of the backend are stopped.", Unit.COUNT,
                gauge_of("fovea_gateway_breaker_open", "{{backend}} {{stage}} {{instance}}"),
            ),
            lines(
                "Opened breakers and ejections", "Events per second.", Unit.PER_SECOND,
                rate("fovea_gateway_breaker_opened_total", "opened {{backend}} {{stage}}", "backend, stage"),
                rate("fovea_gateway_ejections_total", "ejected {{backend}}", "backend"),
            ),
            lines(
                "Attempts", "Requests that were sent to backends, by outcome.", Unit.REQUESTS,
                rate("fovea_gateway_attempts_total", "{{backend}} {{outcome}}", "backend, outcome"),
            ),
            lines(
                "Time to a backend's first byte", "95% of the attempts are faster.", Unit.SECONDS,
                *quantiles("fovea_gateway_first_byte_seconds", "backend", shares=(0.95,)),
            ),
            lines(
                "Load of backends", "Outstanding requests.", Unit.COUNT,
                gauge_of("fovea_gateway_backend_requests", "{{backend}} {{instance}}"),
            ),
            lines(
                "Outstanding tokens", "Tokens of outstanding requests, of text and of images.", Unit.COUNT,
                gauge_of("fovea_gateway_backend_tokens", "{{backend}} {{kind}} {{instance}}"), span=24,
            ),
        ],
    )  # fmt: skip


def _tenants() -> Row:
    limited = f'sum by (tenant) (rate({REQUESTS}{{{OF_MODEL}, status="429"}}{RATE}))'
    budget = 'code=~"rate_limit_exceeded|budget_exceeded|key_limit_exceeded"'
    return (
        "Tenants and limits",
        [
            lines(
                "Requests by tenant", "The first 100 names; further ones are `other`.", Unit.REQUESTS,
                rate(REQUESTS, "{{tenant}}", "tenant", OF_MODEL),
            ),
            lines(
                "Tokens by tenant", "Prompt, visual, cached and completion tokens per second.",
                Unit.PER_SECOND,
                rate("fovea_gateway_tokens_total", "{{tenant}} {{kind}}", "tenant, kind"),
            ),
            lines(
                "Tenants at a limit", "Requests per second that got status 429, by tenant.", Unit.REQUESTS,
                Query(limited, "{{tenant}}"),
            ),
            lines(
                "Limits and budgets", "Refusals per second: a limit per minute, a spent budget, or a "
                "request that is larger than a limit.",
                Unit.REQUESTS,
                rate("fovea_gateway_refused_total", "{{code}}", "code", f"{SERVERS}, {budget}"), span=12,
            ),
            lines(
                "Store of the accounts", "1 in `failing`: the store does not answer. `pending`: changes "
                "that wait for it. `fallbacks`: requests that were decided without it.",
                Unit.COUNT, gauge_of("fovea_gateway_accounts", "{{name}} {{instance}}"), span=12,
            ),
        ],
    )  # fmt: skip


def _cache() -> Row:
    used = "fovea_gateway_cache_total"
    hits = f'sum(rate({used}{{{SERVERS}, result="hit"}}{RATE}))'
    looked = f'sum(rate({used}{{{SERVERS}, result=~"hit|miss|stale"}}{RATE}))'

    def figure(names: str) -> Query:
        where = f'{SERVERS}, name=~"{names}"'
        return gauge_of("fovea_gateway_response_cache", "{{name}} {{instance}}", where)

    return (
        "Response cache",
        [
            lines(
                "Answers from the cache", "Requests per second by their use of the cache.", Unit.REQUESTS,
                rate(used, "{{result}}", "result"),
            ),
            lines(
                "Hit rate", "Share of the requests that can be cached and were found.", Unit.SHARE,
                Query(f"{hits} / ({looked} > 0)", "hits"), most=1,
            ),
            lines(
                "Memory of the cache", "Bytes in use and the ceiling, of all workers.", Unit.BYTES,
                figure("memory_bytes|memory_capacity_bytes"),
            ),
            lines(
                "Not cached", "Requests that could not be cached, and answers that were not stored, since "
                "the start, by reason.",
                Unit.COUNT, figure("bypass_.*|refused_.*"),
            ),
            lines(
                "Evicted and expired", "Answers that the memory lost, since the start.", Unit.COUNT,
                figure("memory_evictions|memory_expired"),
            ),
            lines(
                "Redis", "1 in `redis_failing`: Redis does not answer. Failures and outages since the start.",
                Unit.COUNT, figure("redis_failing|redis_failures|redis_outages"),
            ),
        ],
    )  # fmt: skip


def _experiments() -> Row:
    name = "fovea_gateway_experiment_requests_total"
    of_variant = f"sum by (experiment, variant) (rate({name}{{{SERVERS}}}{RATE}))"
    failed = f'sum by (experiment, variant) (rate({name}{{{SERVERS}, outcome="failed"}}{RATE}))'
    return (
        "Experiments",
        [
            lines(
                "Requests by variant", "Counted outcomes. Copies are not among them.", Unit.REQUESTS,
                Query(of_variant, "{{experiment}} {{variant}}"), span=12,
            ),
            lines(
                "Failures by variant", "Share of the outcomes that failed. `fovea experiment` tells whether "
                "a difference is more than chance.",
                Unit.SHARE,
                Query(f"({failed} or {of_variant} * 0) / ({of_variant} > 0)", "{{experiment}} {{variant}}"),
                span=12,
            ),
        ],
    )  # fmt: skip


def _money() -> Row:
    cost = f"fovea_gateway_cost_total{{{SERVERS}}}"
    tokens = f'fovea_gateway_tokens_total{{{SERVERS}, kind=~"prompt|completion"}}'
    return (
        "Money",
        [
            lines(
                "Cost per hour by tenant", "In the currency of the price table.", Unit.MONEY,
                Query(f"sum by (tenant) (rate({cost}{RATE})) * 3600", "{{tenant}}"), span=12,
            ),
            numbers(
                "Cost in the chosen time", "In the currency of the price table.", Unit.MONEY,
                Query(f"sum(increase({cost}[$__range]))", "cost"),
            ),
            numbers(
                "Cost per 1000 tokens", "What tenants pay for tokens of prompts and answers.", Unit.MONEY,
                Query(f"1000 * sum(rate({cost}{RATE})) / (sum(rate({tokens}{RATE})) > 0)", "per 1000"),
            ),
            numbers(
                "Expected in 30 days", "If the next 30 days are like the chosen time.", Unit.MONEY,
                Query(f"sum(rate({cost}[$__range])) * 86400 * 30", "30 days"),
            ),
        ],
    )  # fmt: skip
