"""Cases of the alerts on gateways."""

from __future__ import annotations

from tools.dashboards.case import GATEWAY, Case, gateway

JOB = {"job": "fovea-gateway"}
ANSWERED = 'api="chat", model="m", tenant="alice", status="200"'
LIMITED = 'api="chat", model="m", tenant="alice", status="429"'
REQUESTS = gateway("fovea_gateway_requests_total", ANSWERED)
UP = gateway("fovea_gateway_backend_up", 'backend="one"')
OTHER_UP = gateway("fovea_gateway_backend_up", 'backend="two"')
BREAKER = gateway("fovea_gateway_breaker_open", 'backend="one", stage="vision"')
BUDGET = gateway("fovea_gateway_refused_total", 'code="budget_exceeded"')
QUEUED = gateway("fovea_gateway_queued", 'model="m"')
FAILING = gateway("fovea_gateway_accounts", 'name="failing"')
REDIS = gateway("fovea_gateway_response_cache", 'name="redis_failing"')
GATEWAYS = (
    Case(
        "FoveaGatewayNoBackend", GATEWAY, "0",
        {UP: "1x5 0x60", OTHER_UP: "1x5 0x60"}, {UP: "0x60", OTHER_UP: "0x60"},  # never up: it starts
    ),
    Case("FoveaGatewayBackendAway", {**GATEWAY, "backend": "one"}, "0", {UP: "0x60"}, {UP: "1x17 0x60"}),
    Case(
        "FoveaGatewayBreakerOpen", {**GATEWAY, "backend": "one", "stage": "vision"}, "1",
        {BREAKER: "1x60"}, {BREAKER: "0x60"},
    ),
    Case(
        "FoveaGatewayRetries", GATEWAY, "20%",
        {REQUESTS: "0+60x60", gateway("fovea_gateway_retries_total", 'kind="retry"'): "0+12x60"},
        {REQUESTS: "0+60x60", gateway("fovea_gateway_retries_total", 'kind="retry"'): "0+3x60"},
    ),
    Case(
        "FoveaGatewayTenantAtLimit", {**JOB, "tenant": "alice"}, "75%",
        {REQUESTS: "0+60x60", gateway("fovea_gateway_requests_total", LIMITED): "0+180x60"},
        {REQUESTS: "0+60x60", gateway("fovea_gateway_requests_total", LIMITED): "0+30x60"},
        at="45m",
    ),
    Case("FoveaGatewayBudgetSpent", JOB, "1", {BUDGET: "0+60x60"}, {BUDGET: "60x60"}),
    Case("FoveaGatewayQueueGrowing", GATEWAY, "41", {QUEUED: "21+1x60"}, {QUEUED: "50x60"}),
    Case(
        "FoveaGatewayDegrading", GATEWAY, "50%",
        {REQUESTS: "0+60x60", gateway("fovea_gateway_degraded_total"): "0+30x60"},
        {REQUESTS: "0+60x60", gateway("fovea_gateway_degraded_total"): "0+6x60"},
    ),
    Case(
        "FoveaGatewayAccountsFailing", {**GATEWAY, "name": "failing"}, "1",
        {FAILING: "1x60"}, {FAILING: "0x60"},
    ),
    Case(
        "FoveaGatewayRedisFailing", {**GATEWAY, "name": "redis_failing"}, "1",
        {REDIS: "1x60"}, {REDIS: "0x60"},
    ),
)  # fmt: skip
