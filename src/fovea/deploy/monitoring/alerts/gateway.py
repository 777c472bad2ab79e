"""Alerts on symptoms of a gateway: backends, tenants, its queue, and the stores that it uses."""

from __future__ import annotations

from fovea.deploy.monitoring.rule import Alert, Condition

WHERE = "{{ $labels.instance }}"
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
