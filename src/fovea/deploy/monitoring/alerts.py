"""All alerts: on error budgets, and on symptoms of servers, of their memory and of gateways."""

from __future__ import annotations

from typing import NamedTuple

from fovea.deploy.monitoring.objectives import JOBS, ROUTES, Alert, Condition, Group


class BurnWindows(NamedTuple):
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


BURN_WINDOWS = (
    BurnWindows("FoveaBudgetBurnFastest", "critical", 14.4, "1h", "5m", "2m", "2 days"),
    BurnWindows("FoveaBudgetBurnFast", "critical", 6, "6h", "30m", "5m", "5 days"),
    BurnWindows("FoveaBudgetBurnSlow", "warning", 3, "1d", "2h", "15m", "10 days"),
    BurnWindows("FoveaBudgetBurnSlowest", "info", 1, "3d", "6h", "1h", "30 days"),
)


def burn_alerts() -> list[Alert]:
    """Return the four alerts. Each covers all objectives; the label `slo` names the one that it is about."""
    return [_burn_alert(pace) for pace in BURN_WINDOWS]


def _burn_alert(pace: BurnWindows) -> Alert:
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


WHERE = "{{ $labels.instance }}"


def server_alerts() -> list[Alert]:
    """Return the alerts on servers."""
    return [*_life(), *_queue(), *_caches(), *_defects()]


def _life() -> list[Alert]:
    return [
        Alert(
            "FoveaAbsent", "critical", "5m",
            (Condition(f"absent(up{{{JOBS}}})", ""),),
            "Prometheus scrapes no server of Fovea",
            "No target of a job fovea* has existed for 5 minutes (absent is {{ $value }}).",
        ),
        Alert(
            "FoveaDown", "critical", "1m",
            (Condition(f"up{{{JOBS}}}", "== 0"),),
            f"{WHERE} cannot be scraped",
            f"The metrics of {WHERE} ({{{{ $labels.job }}}}) have not been read for a minute "
            "(up is {{ $value }}).",
        ),
        Alert(
            "FoveaNotReady", "warning", "10m",
            (Condition("fovea:ready", "== 0"),),
            f"{WHERE} runs but is not ready",
            f"{WHERE} has refused all requests for 10 minutes: it is loading, it is ending, or its engine "
            "has stopped (ready is {{ $value }}).",
        ),
        Alert(
            "FoveaConnectionsNearlyFull", "warning", "5m",
            (Condition("fovea:connections_open / (fovea:connections_capacity > 0)", "> 0.9"),),
            f"{WHERE} has nearly all of its connections in use",
            f"{{{{ $value | humanizePercentage }}}} of the connections of {WHERE} are open. Beyond 100% it "
            "closes idle ones and refuses new ones.",
        ),
    ]  # fmt: skip


def _queue() -> list[Alert]:
    refused = 'sum by (job, instance) (rate(fovea:refused_total{code="overloaded"}[5m]))'
    asked = f"sum by (job, instance) (rate(fovea:requests_total{{{ROUTES}}}[5m]))"
    return [
        Alert(
            "FoveaQueueGrowing", "warning", "5m",
            (
                Condition("fovea:requests_waiting", "> 10"),
                Condition("deriv(fovea:requests_waiting[10m])", "> 0"),
            ),
            f"The queue of {WHERE} grows",
            f"{{{{ $value }}}} requests wait at {WHERE}, and they become more.",
        ),
        Alert(
            "FoveaQueueSlow", "warning", "2m",
            (Condition("fovea:oldest_waiting_seconds", "> 30"),),
            f"A request has waited for long at {WHERE}",
            f"The oldest waiting request of {WHERE} has waited {{{{ $value | humanizeDuration }}}}.",
        ),
        Alert(
            "FoveaOverloaded", "warning", "5m",
            (Condition(f"{refused} / ({asked} > 0)", "> 0.05"),),
            f"{WHERE} refuses requests because its queue is full",
            f"{WHERE} has refused {{{{ $value | humanizePercentage }}}} of its requests with status 429 "
            "(overloaded) in the last 5 minutes.",
        ),
    ]  # fmt: skip


def _caches() -> list[Alert]:
    evicted, hits = "rate(fovea:embed_cache_evictions_total[15m])", "rate(fovea:embed_cache_hits_total[15m])"
    return [
        Alert(
            "FoveaKvCacheFull", "warning", "5m",
            (
                Condition("fovea:kv_blocks_used / (fovea:kv_blocks_total > 0)", "> 0.95"),
                Condition("rate(fovea:preemptions_total[5m])", "> 0"),
            ),
            f"The KV cache of {WHERE} is full, and answers are computed twice",
            f"Running requests of {WHERE} hold {{{{ $value | humanizePercentage }}}} of the KV blocks, and "
            "some lose theirs and start again.",
        ),
        Alert(
            "FoveaEncoderCacheThrash", "warning", "15m",
            (Condition(evicted, "> 0.1"), Condition(hits, f"< 0.1 * {evicted}")),
            f"The cache of encoder outputs of {WHERE} evicts more than it finds",
            f"{WHERE} evicts {{{{ $value | humanize }}}} encoder outputs per second, and finds less than a "
            "tenth as many. The cache is too small for its images, or every image is new.",
        ),
        Alert(
            "FoveaDiskTierOff", "warning", "1m",
            (Condition("fovea:embed_disk_off", "== 1"),),
            f"{WHERE} no longer uses its disk for encoder outputs",
            f"The disk of {WHERE} failed, so that images are encoded again after a restart "
            "(embed_disk_off is {{ $value }}).",
        ),
        Alert(
            "FoveaDiskTierDamaged", "warning", "0m",
            (Condition("increase(fovea:embed_disk_corrupt_total[1h])", "> 0"),),
            f"Files of encoder outputs of {WHERE} are damaged",
            f"{WHERE} has removed {{{{ $value | humanize }}}} damaged files in the last hour. Answers are "
            "not wrong, because the images are encoded again.",
        ),
    ]  # fmt: skip


def _defects() -> list[Alert]:
    return [
        Alert(
            "FoveaDecoderCrashes", "warning", "0m",
            (Condition("increase(fovea:decoder_crashes_total[10m])", "> 3"),),
            f"Decoding processes of {WHERE} die",
            f"{{{{ $value | humanize }}}} decoding processes of {WHERE} have died in 10 minutes. Somebody "
            "sends harmful files, or memory is short.",
        ),
        Alert(
            "FoveaFailedSteps", "warning", "0m",
            (Condition("increase(fovea:failed_steps_total[10m])", "> 3"),),
            f"Steps of the engine of {WHERE} fail",
            f"{{{{ $value | humanize }}}} steps of {WHERE} have raised an error in 10 minutes. Each ends the "
            "request that caused it.",
        ),
        Alert(
            "FoveaIntegrityErrors", "critical", "0m",
            (Condition("increase(fovea:integrity_errors_total[1h])", "> 0"),),
            f"A consistency check of the caches of {WHERE} failed",
            f"{{{{ $value | humanize }}}} consistency checks of {WHERE} have failed in the last hour. This "
            "is a defect of the program.",
        ),
        Alert(
            "FoveaKeysFileBroken", "warning", "1m",
            (Condition("fovea:keys_file_broken", "== 1"),),
            f"{WHERE} cannot read its keys file",
            f"The keys of {WHERE} are still those of before: new keys do not work, and revoked ones do "
            "(keys_file_broken is {{ $value }}).",
        ),
        Alert(
            "FoveaTraceSpansDropped", "info", "10m",
            (
                Condition(
                    "(rate(fovea:trace_spans_dropped_total[10m])"
                    ' or rate(fovea_gateway_traces{name="trace_spans_dropped"}[10m]))',
                    "> 0",
                ),
            ),
            f"{WHERE} drops spans of traces",
            f"{WHERE} drops {{{{ $value | humanize }}}} spans per second, because the collector is away or "
            "slow. Requests are not affected.",
        ),
    ]  # fmt: skip


RESIDENT = f"process_resident_memory_bytes{{{JOBS}}}"
LIMIT = f"cgroup_memory_limit_bytes{{{JOBS}}}"


def memory_alerts() -> list[Alert]:
    """Return the alerts on memory.

    The use of a control group includes pages of files, which the kernel drops when it needs room, so the
    first alert compares the resident memory of the processes with the limit. Without a limit that is 0.
    """
    return [
        Alert(
            "FoveaMemoryNearLimit", "critical", "5m",
            (Condition(f"{RESIDENT} / {LIMIT}", "> 0.9"),),
            f"{WHERE} has nearly reached its limit of memory",
            f"The processes of {WHERE} hold {{{{ $value | humanizePercentage }}}} of the memory that their "
            "container may use. At 100% the system ends one of them.",
        ),
        Alert(
            "FoveaMemoryGrowing", "warning", "30m",
            (
                Condition(
                    f"min_over_time({RESIDENT}[1h]) / max_over_time({RESIDENT}[1h] offset 6h)", "> 1.2"
                ),
                Condition(f"deriv({RESIDENT}[2h])", "> 0"),
            ),
            f"The memory of {WHERE} grows",
            f'The resident memory of {WHERE} is {{{{ $value | printf "%.2f" }}}} times what it was 6 hours '
            "ago, and grows on.",
        ),
        Alert(
            "FoveaDeviceMemoryNearlyFull", "warning", "5m",
            (Condition("fovea:device_memory_used_bytes / fovea:device_memory_total_bytes", "> 0.97"),),
            f"GPU {{{{ $labels.gpu }}}} of {WHERE} has hardly any free memory",
            f"{{{{ $value | humanizePercentage }}}} of the memory of GPU {{{{ $labels.gpu }}}} of {WHERE} is "
            "in use. The next large image can fail for lack of it.",
        ),
    ]  # fmt: skip


REQUESTS = "fovea_gateway_requests_total"


def gateway_alerts() -> list[Alert]:
    """Return the alerts on gateways."""
    return [*_backends(), *_tenants(), *_load(), *_stores()]


def _backends() -> list[Alert]:
    return [
        Alert(
            "FoveaGatewayNoBackend", "critical", "1m",
            (Condition("max by (job, instance) (fovea_gateway_backend_up)", "== 0"),),
            f"No backend of the gateway {WHERE} accepts requests",
            f"All backends of {WHERE} are away, busy or ejected, so that it answers with 503 (backend_up is "
            "at most {{ $value }}).",
        ),
        Alert(
            "FoveaGatewayBackendAway", "warning", "5m",
            (Condition("fovea_gateway_backend_up", "== 0"),),
            "Backend {{ $labels.backend }} gets no requests",
            f"The gateway {WHERE} has sent no requests to {{{{ $labels.backend }}}} for 5 minutes "
            "(backend_up is {{ $value }}).",
        ),
        Alert(
            "FoveaGatewayBreakerOpen", "warning", "1m",
            (Condition("fovea_gateway_breaker_open", "> 0"),),
            "The circuit breaker of {{ $labels.backend }} ({{ $labels.stage }}) is open",
            f"Requests of {WHERE} to the stage {{{{ $labels.stage }}}} of {{{{ $labels.backend }}}} keep "
            "failing (breaker_open is {{ $value }}).",
        ),
        Alert(
            "FoveaGatewayRetries", "warning", "10m",
            (
                Condition(
                    "sum by (job, instance) (rate(fovea_gateway_retries_total[5m]))"
                    f" / (sum by (job, instance) (rate({REQUESTS}[5m])) > 0)",
                    "> 0.1",
                ),
            ),
            f"The gateway {WHERE} repeats many requests",
            f"{{{{ $value | humanizePercentage }}}} of the requests of {WHERE} need a further attempt.",
        ),
    ]  # fmt: skip


def _tenants() -> list[Alert]:
    return [
        Alert(
            "FoveaGatewayTenantAtLimit", "info", "30m",
            (
                Condition(
                    f'sum by (job, tenant) (rate({REQUESTS}{{status="429"}}[10m]))'
                    f" / (sum by (job, tenant) (rate({REQUESTS}[10m])) > 0)",
                    "> 0.5",
                ),
            ),
            "Tenant {{ $labels.tenant }} has been at its limit for long",
            "{{ $value | humanizePercentage }} of the requests of {{ $labels.tenant }} have been refused "
            "with status 429 for half an hour.",
        ),
        Alert(
            "FoveaGatewayBudgetSpent", "info", "10m",
            (
                Condition(
                    'sum by (job) (rate(fovea_gateway_refused_total{code="budget_exceeded"}[10m]))', "> 0"
                ),
            ),
            "A tenant of {{ $labels.job }} has spent its budget",
            "{{ $value | humanize }} requests per second are refused, because the budget of a day or month "
            "is spent.",
        ),
    ]  # fmt: skip


def _load() -> list[Alert]:
    return [
        Alert(
            "FoveaGatewayQueueGrowing", "warning", "5m",
            (
                Condition("sum by (job, instance) (fovea_gateway_queued)", "> 20"),
                Condition("sum by (job, instance) (deriv(fovea_gateway_queued[10m]))", "> 0"),
            ),
            f"The queue of the gateway {WHERE} grows",
            f"{{{{ $value }}}} requests wait at {WHERE} for a backend, and they become more.",
        ),
        Alert(
            "FoveaGatewayDegrading", "info", "15m",
            (
                Condition(
                    "sum by (job, instance) (rate(fovea_gateway_degraded_total[5m]))"
                    f" / (sum by (job, instance) (rate({REQUESTS}[5m])) > 0)",
                    "> 0.1",
                ),
            ),
            f"The gateway {WHERE} lowers the detail of images",
            f"{{{{ $value | humanizePercentage }}}} of the requests of {WHERE} have been answered with fewer "
            "visual tokens, because the backends are nearly full.",
        ),
    ]  # fmt: skip


def _stores() -> list[Alert]:
    return [
        Alert(
            "FoveaGatewayAccountsFailing", "critical", "1m",
            (Condition('fovea_gateway_accounts{name="failing"}', "> 0"),),
            f"The store of the tenants' accounts of {WHERE} fails",
            f"The gateway {WHERE} cannot reach the store of the accounts. By accounts_on_failure it refuses "
            "tenants with limits, or counts alone (failing is {{ $value }}).",
        ),
        Alert(
            "FoveaGatewayRedisFailing", "warning", "5m",
            (Condition('fovea_gateway_response_cache{name="redis_failing"}', "> 0"),),
            f"Redis of the response cache of {WHERE} does not answer",
            f"The gateway {WHERE} finds only answers in its own memory (redis_failing is {{{{ $value }}}}).",
        ),
    ]  # fmt: skip


def alert_groups() -> list[Group]:
    """Return the groups of alerts."""
    return [
        Group("fovea-budgets", burn_alerts()),
        Group("fovea-server", server_alerts()),
        Group("fovea-memory", memory_alerts()),
        Group("fovea-gateway", gateway_alerts()),
    ]
