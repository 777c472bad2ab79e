"""The overview: latency by stage, throughput, devices, errors and cost."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from fovea.deploy.monitoring.objectives import ROUTES
from tools.dashboards.page import SERVER_LABELS, Constant, Row, page
from tools.dashboards.panels import (
    RATE,
    SERVERS,
    Query,
    Unit,
    buckets,
    dial,
    gauge_of,
    lines,
    mean,
    numbers,
    quantiles,
    rate,
)

ASKED = f"{SERVERS}, {ROUTES}"
TOKENS = f'{SERVERS}, kind=~"prompt|completion"'
ALL = f"sum(rate(fovea:requests_total{{{ASKED}}}{RATE}))"
RUNNING = f"count(up{{{SERVERS}}} == 1)"


def overview() -> Dashboard:
    """Return the dashboard."""
    return page(
        "overview",
        "Fovea: overview",
        "How fast the servers answer, how much they do, how full they are, how often they fail, and what "
        "that costs.",
        SERVER_LABELS,
        [_latency(), _throughput(), _devices(), _errors(), _cost()],
        [Constant("price_per_hour", "price of a server per hour", "0.35")],
    )


def _latency() -> Row:
    stages = Query(
        f"sum by (stage) (rate(fovea:stage_seconds_sum{{{SERVERS}}}{RATE}))"
        f" / sum by (stage) (rate(fovea:stage_seconds_count{{{SERVERS}}}{RATE}))",
        "{{stage}}",
    )
    return (
        "Request latency breakdown",
        [
            lines(
                "Mean time of a request by stage",
                "Where the time of a mean request goes. The areas add up to its whole time: loading images "
                "(fetch, media_decode, preprocess), waiting (queue), the vision encoder (encode), the "
                "prompt (prefill) and the answer (decode).",
                Unit.SECONDS, stages, stacked=True, span=12,
            ),
            lines(
                "Vision, fusion, first token, tokens",
                "Vision encoding and fusion (the projector into the decoder's space) are means per image. "
                "Token generation is the mean per request.",
                Unit.SECONDS,
                mean("fovea:image_encode_seconds", "vision encoding"),
                mean("fovea:image_project_seconds", "fusion (projector)"),
                mean("fovea:ttft_seconds", "time to first token"),
                mean("fovea:stage_seconds", "token generation", where=f'{SERVERS}, stage="decode"'),
                span=12,
            ),
            lines(
                "Time of a request", "From the first to the last byte: half, 95% and 99% are faster.",
                Unit.SECONDS, *quantiles("fovea:request_seconds", where=ASKED),
            ),
            lines(
                "Time to the first token", "From arrival, loading of images included.",
                Unit.SECONDS, *quantiles("fovea:ttft_seconds"),
            ),
            lines(
                "Time between two tokens", "How fast answers grow, as clients see it.",
                Unit.SECONDS, *quantiles("fovea:itl_seconds"),
            ),
        ],
    )  # fmt: skip


def _throughput() -> Row:
    def drafts(kind: str) -> str:
        return f"sum by (drafter) (rate(fovea:drafter_{kind}tokens_total{{{SERVERS}}}{RATE}))"

    return (
        "Throughput",
        [
            lines(
                "Requests per second", "Ended requests by route.", Unit.REQUESTS,
                rate("fovea:requests_total", "{{route}}", "route"),
            ),
            lines(
                "Tokens per second",
                "Tokens of prompts and answers. Cached and image tokens are parts of the prompt.",
                Unit.PER_SECOND, rate("fovea:tokens_total", "{{kind}}", "kind"),
            ),
            lines(
                "Images per second",
                "Images of requests, and images that had to be encoded. The difference was cached.",
                Unit.PER_SECOND, rate("fovea:images_total", "in requests"),
                rate("fovea:images_encoded_total", "encoded"),
            ),
            lines(
                "Requests in the engine", "Requests that are computed, and that wait for memory or others.",
                Unit.COUNT, gauge_of("fovea:requests_running", "running {{instance}}"),
                gauge_of("fovea:requests_waiting", "waiting {{instance}}"), span=12,
            ),
            lines(
                "Longest wait in the queue", "How long the oldest waiting request has waited.", Unit.SECONDS,
                gauge_of("fovea:oldest_waiting_seconds"), span=12,
            ),
            lines(
                "Speculation",
                "Share of the drafts that became part of an answer, by their source. Drafts are tokens that "
                "were expected and computed together in one step. Empty without drafts.",
                Unit.SHARE, Query(f"{drafts('accepted_')} / {drafts('')}", "{{drafter}}"), most=1, span=24,
            ),
        ],
    )  # fmt: skip


def _devices() -> Row:
    return (
        "GPU utilization",
        [
            dial(
                "GPU in use", "Share of time in which a GPU ran at least one kernel. Empty without a GPU.",
                Unit.SHARE, gauge_of("fovea:device_utilization_share", "{{instance}} GPU {{gpu}}"),
                warn=0.9, bad=0.98,
            ),
            lines(
                "GPU in use over time", "Share of time in which a GPU ran at least one kernel.",
                Unit.SHARE, gauge_of("fovea:device_utilization_share", "{{instance}} GPU {{gpu}}"),
                most=1, span=10,
            ),
            lines(
                "Use by component",
                "Share of time in which a component of the engine computed. The vision encoder includes the "
                "projector. With several servers, this is their sum.",
                Unit.SHARE, rate("fovea:encode_seconds_total", "vision encoder"),
                rate("fovea:image_project_seconds_sum", "fusion (projector)"), span=10,
            ),
            lines(
                "Memory in use",
                "Parts of the memory of GPUs, and of the KV blocks.",
                Unit.SHARE,
                Query(
                    f"fovea:device_memory_used_bytes{{{SERVERS}}} "
                    f"/ fovea:device_memory_total_bytes{{{SERVERS}}}",
                    "{{instance}} GPU {{gpu}}",
                ),
                Query(
                    f"fovea:kv_blocks_used{{{SERVERS}}} / (fovea:kv_blocks_total{{{SERVERS}}} > 0)",
                    "{{instance}} KV blocks",
                ),
                most=1,
            ),
            lines(
                "Memory of processes",
                "Resident memory of the server, all memory of its container with pages of files, and the "
                "container's limit.",
                Unit.BYTES, gauge_of("process_resident_memory_bytes", "resident {{instance}}"),
                gauge_of("cgroup_memory_usage_bytes", "container {{instance}}"),
                gauge_of("cgroup_memory_limit_bytes", "limit {{instance}}"),
            ),
            buckets(
                "Batch size distribution", "How many sequences shared a step of the engine, over time.",
                Unit.COUNT, "fovea:step_sequences",
            ),
            lines(
                "Batch size", "Sequences that shared a step: half and 95% of the steps had fewer.",
                Unit.COUNT, *quantiles("fovea:step_sequences", shares=(0.5, 0.95)),
                mean("fovea:step_sequences", "mean"),
            ),
        ],
    )  # fmt: skip


def _errors() -> Row:
    def share(label: str, legend: str) -> Query:
        failed = f"sum(rate(fovea:requests_total{{{ASKED}, {label}}}{RATE}))"
        return Query(f"({failed} or vector(0)) / ({ALL} > 0)", legend)

    def refused(code: str) -> str:
        return f'sum(increase(fovea:refused_total{{{SERVERS}, code="{code}"}}[$__range]))'

    wrong, failed = share('status=~"4.."', "4xx"), share('status=~"5.."', "5xx")
    late = f'sum(rate(fovea:refused_total{{{SERVERS}, code="deadline_exceeded"}}{RATE}))'
    return (
        "Error rate",
        [
            numbers(
                "Failed requests", "Share of requests that the server failed (5xx).", Unit.SHARE, failed,
                warn=0.001, bad=0.01,
            ),
            lines(
                "Errors",
                "Share of requests by class: 4xx is the client's mistake or limit, 5xx the server's failure.",
                Unit.SHARE, wrong, failed, span=10,
            ),
            lines(
                "Timeouts", "Share of requests whose own timeout ran out (408).", Unit.SHARE,
                Query(f"({late} or vector(0)) / ({ALL} > 0)", "timeouts"), span=10,
            ),
            numbers(
                "Queue overflows",
                "Requests that were refused with 429 in the chosen time, because the queue was full.",
                Unit.COUNT, Query(f"{refused('overloaded')} or vector(0)", "refused"), warn=1,
            ),
            lines(
                "Refusals by code", "Requests per second that got an error, by the code of the error.",
                Unit.REQUESTS, rate("fovea:refused_total", "{{code}}", "code"), span=10,
            ),
            lines(
                "Ends of answers", "Answers per second by the reason of their end.", Unit.PER_SECOND,
                rate("fovea:finished_total", "{{reason}}", "reason"), span=10,
            ),
        ],
    )  # fmt: skip


def _cost() -> Row:
    tokens = f"sum(rate(fovea:tokens_total{{{TOKENS}}}{RATE}))"
    hours = f"sum(sum_over_time((up{{{SERVERS}}} == 1)[$__range:$__interval])) * $__interval_ms / 3600000"
    return (
        "Cost",
        [
            numbers(
                "Cost per 1000 tokens",
                "Price of the running servers, divided by the tokens of prompts and answers. Type the price "
                "of a server per hour at the top of the page; the currency is yours.",
                Unit.MONEY, Query(f"$price_per_hour * {RUNNING} / ({tokens} * 3.6)", "per 1000 tokens"),
                span=6,
            ),
            numbers(
                "Hours of servers",
                "Hours that servers ran in the chosen time. With one GPU for each, these are GPU hours.",
                Unit.HOURS, Query(hours, "hours"), span=6,
            ),
            numbers(
                "Spent in the chosen time", "These hours times the price of an hour.", Unit.MONEY,
                Query(f"$price_per_hour * {hours}", "spent"), span=6,
            ),
            numbers(
                "Estimated monthly spend", "Price of the servers that run now, for 730 hours.", Unit.MONEY,
                Query(f"$price_per_hour * 730 * {RUNNING}", "per month"), span=6,
            ),
            lines(
                "Cost per 1000 tokens over time",
                "It rises when servers idle, and falls with caches and larger batches.", Unit.MONEY,
                Query(f"$price_per_hour * {RUNNING} / ({tokens} * 3.6)", "per 1000 tokens"), span=24,
            ),
        ],
    )  # fmt: skip
