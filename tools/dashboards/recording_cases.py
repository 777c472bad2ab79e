"""Cases of the recording rules: counters of an hour, and what the rules have to make of them."""

from __future__ import annotations

from typing import Any

from fovea.deploy.monitoring.objectives import SHORT, as_yaml
from tools.dashboards.case import gateway, server

CHAT = 'route="/v1/chat/completions"'
MINUTES = 60
MILLION = 1_000_000


def recording_tests() -> str:
    """Return a file for `promtool test rules`.

    Each minute 100 requests end at the server. 2 of them fail, 40 take longer than 30 s, and 10 longer than
    120 s. 4 of 100 first tokens come later than 10 s, and 20 of 1,000 further ones later than 0.5 s. The
    gateway has 200 requests, of which 1 fails. The server is not ready in 6 of the first 60 minutes.
    """
    tests = [
        {
            "name": "shares, burn rates and budgets",
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in _input().items()],
            "promql_expr_test": [_check(*each) for each in _expected()],
        },
        {
            "name": "without requests there is no ratio, and a server that is away is not ready",
            "interval": "1m",
            "input_series": [
                {"series": server("fovea:requests_total", f'{CHAT}, status="200"'), "values": "5x60"},
                {"series": server("up"), "values": "0x60"},
            ],
            "promql_expr_test": [
                _check('fovea_slo:bad:ratio5m{slo="errors"}', "30m", {}),
                _check("fovea_slo:ready:bool", "30m", {'fovea_slo:ready:bool{job="fovea"}': 0}),
                _check(
                    'fovea_slo:bad:ratio1h{slo="availability"}',
                    "30m",
                    {'fovea_slo:bad:ratio1h{job="fovea", slo="availability"}': 1},
                ),
            ],
        },
        {
            "name": "a third of the requests fail, and the first alert fires",
            "interval": "1m",
            "input_series": [
                {"series": server("fovea:requests_total", f'{CHAT}, status="200"'), "values": "0+60x60"},
                {"series": server("fovea:requests_total", f'{CHAT}, status="503"'), "values": "0+30x60"},
            ],
            "promql_expr_test": [
                _check(
                    'count(ALERTS{alertname="FoveaBudgetBurnFastest", alertstate="firing", slo="errors"})',
                    "20m",
                    {"{}": 1},
                )
            ],
        },
        _pages("a first start pages nobody", "0x25 1x40", {"20m": False, "35m": False}),
        _pages("all backends are lost later", "0x10 1x10 0x30", {"19m": False, "26m": True}),
        _pages("nothing ever becomes ready", "0x60", {"29m": False, "34m": True}),
        _pages(
            "none is ready after Prometheus was away",
            "1 _x70 0x60",
            {"95m": False, "104m": True},
            "1 _x70 1x60",
        ),
    ]
    head = "# Written by tools/dashboards from its cases. Run it: promtool test rules FILE\n"
    rules = ["../recording.yml", "../alerts.yml"]
    return head + as_yaml({"rule_files": rules, "evaluation_interval": "1m", "tests": tests})


def _pages(name: str, ready: str, expected: dict[str, bool], up: str = "1x60") -> dict[str, Any]:
    """Return a test of an engine and a gateway.

    ready, up: whether the engine is ready and is scraped, by minutes.
    expected: whether both alerts about that fire, by times.
    """
    firing = {'{alertname="FoveaBudgetBurnFastest"}': 2.0, '{alertname="FoveaGatewayNoBackend"}': 1.0}
    pages = 'count by (alertname) (ALERTS{severity="critical", alertstate="firing"})'
    return {
        "name": name,
        "interval": "1m",
        "input_series": [
            {"series": server("fovea:ready"), "values": ready},
            {"series": gateway("fovea_gateway_backend_up", 'backend="one"'), "values": ready},
            {"series": server("up"), "values": up},
            {"series": gateway("up"), "values": up},
        ],
        "promql_expr_test": [_check(pages, at, firing if fires else {}) for at, fires in expected.items()],
    }


def _input() -> dict[str, str]:
    def bucket(le: str, each: int) -> tuple[str, str]:
        name = server("fovea:request_seconds_bucket", f'{CHAT}, le="{le}"')
        return name, f"0+{each}x{MINUTES}"

    return {
        server("fovea:requests_total", f'{CHAT}, status="200"'): f"0+98x{MINUTES}",
        server("fovea:requests_total", f'{CHAT}, status="500"'): f"0+2x{MINUTES}",
        server("fovea:requests_total", 'route="/v1/models", status="500"'): f"0+50x{MINUTES}",
        **dict(bucket(le, each) for le, each in (("30.0", 60), ("120.0", 90), ("+Inf", 100))),
        server("fovea:request_seconds_count", CHAT): f"0+100x{MINUTES}",
        server("fovea:ttft_seconds_bucket", 'le="10.0"'): f"0+96x{MINUTES}",
        server("fovea:ttft_seconds_bucket", 'le="+Inf"'): f"0+100x{MINUTES}",
        server("fovea:ttft_seconds_count"): f"0+100x{MINUTES}",
        server("fovea:itl_seconds_bucket", 'le="0.5"'): f"0+980x{MINUTES}",
        server("fovea:itl_seconds_count"): f"0+1000x{MINUTES}",
        server("fovea:ready"): f"1 0x5 1x{MINUTES}",
        server("up"): f"1x{MINUTES}",
        gateway("fovea_gateway_requests_total", 'status="200", tenant="a"'): f"0+199x{MINUTES}",
        gateway("fovea_gateway_requests_total", 'status="502", tenant="a"'): f"0+1x{MINUTES}",
        gateway("fovea_gateway_request_seconds_count", 'model="m"'): f"0+200x{MINUTES}",
        gateway("fovea_gateway_request_seconds_bucket", 'model="m", le="120.0"'): f"0+180x{MINUTES}",
    }


def _expected() -> list[tuple[str, str, dict[str, float]]]:
    """Return expressions, times, and the values that they have then."""

    def own(name: str, slo: str, value: float, job: str = "fovea") -> tuple[str, str, dict[str, float]]:
        selector = f'{name}{{job="{job}", slo="{slo}"}}'
        return f"round({selector} * 1e6)", "59m", {f'{{job="{job}", slo="{slo}"}}': round(value * MILLION)}

    shares = [
        own(f"fovea_slo:bad:ratio{window}", slo, value)
        for window in (*SHORT, "1d", "3d", "30d")
        for slo, value in (
            ("errors", 0.02),
            ("latency_p50", 0.4),
            ("latency_p95", 0.1),
            ("latency_p99", 0.1),
            ("ttft", 0.04),
            ("itl", 0.02),
        )
    ]
    return [
        *shares,
        own("fovea_slo:bad:ratio5m", "errors", 0.005, "fovea-gateway"),
        own("fovea_slo:bad:ratio5m", "latency_p95", 0.1, "fovea-gateway"),
        own("fovea_slo:burn:rate1h", "errors", 20.0),
        own("fovea_slo:burn:rate3d", "latency_p95", 2.0),
        own("fovea_slo:burn:rate5m", "latency_p50", 0.8),
        own("fovea_slo:budget_left:ratio30d", "latency_p95", -1.0),
        own("fovea_slo:budget_left:ratio30d", "latency_p50", 0.2),
        (
            'round(fovea_slo:bad:ratio1h{slo="availability"} * 1e6)',
            "59m",
            {'{job="fovea", slo="availability"}': 100_000},
        ),
    ]


def _check(expression: str, at: str, expected: dict[str, float]) -> dict[str, Any]:
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    return {"expr": expression, "eval_time": at, "exp_samples": samples}
