"""Cases of the alerts on error budgets, servers and memory."""

from __future__ import annotations

from tools.dashboards.case import SERVER, Case, server

CHAT = 'route="/v1/chat/completions", status="200"'
SLO = {"job": "fovea", "slo": "errors"}


def _burn(alert: str, long: str, short: str, high: str, low: str, at: str = "20m") -> Case:
    """Return the case of an alert on a budget.

    With the long window alone it is silent: the disturbance is over.
    """
    name = '{job="fovea", slo="errors"}'
    series = (f"fovea_slo:burn:rate{long}{name}", f"fovea_slo:burn:rate{short}{name}")
    fires = dict.fromkeys(series, f"{high}x120")
    return Case(alert, SLO, high, fires, {series[0]: f"{high}x120", series[1]: f"{low}x120"}, at)


BUDGETS = (
    _burn("FoveaBudgetBurnFastest", "1h", "5m", "15.0", "14.4"),
    _burn("FoveaBudgetBurnFast", "6h", "30m", "6.5", "6"),
    _burn("FoveaBudgetBurnSlow", "1d", "2h", "3.1", "3"),
    _burn("FoveaBudgetBurnSlowest", "3d", "6h", "1.1", "1", at="90m"),
)
SERVERS = (
    Case(
        "FoveaAbsent", {}, "1",
        {'up{job="node", instance="a:9100"}': "1x60"}, {server("up"): "0x60"},
    ),
    Case("FoveaDown", SERVER, "0", {server("up"): "0x60"}, {server("up"): "1x60"}),
    Case(
        "FoveaNotReady", SERVER, "0",
        {server("fovea:ready"): "0x60"}, {server("fovea:ready"): "1x15 0x60"},
    ),
    Case(
        "FoveaConnectionsNearlyFull", SERVER, "95%",
        {server("fovea:connections_open"): "95x60", server("fovea:connections_capacity"): "100x60"},
        {server("fovea:connections_open"): "90x60", server("fovea:connections_capacity"): "100x60"},
    ),
    Case(
        "FoveaQueueGrowing", SERVER, "51",
        {server("fovea:requests_waiting"): "11+2x60"}, {server("fovea:requests_waiting"): "50x60"},
    ),
    Case(
        "FoveaQueueSlow", SERVER, "45s",
        {server("fovea:oldest_waiting_seconds"): "45x60"}, {server("fovea:oldest_waiting_seconds"): "30x60"},
    ),
    Case(
        "FoveaOverloaded", SERVER, "25%",
        {server("fovea:refused_total", 'code="overloaded"'): "0+15x60",
         server("fovea:requests_total", CHAT): "0+60x60"},
        {server("fovea:refused_total", 'code="overloaded"'): "0+3x60",
         server("fovea:refused_total", 'code="invalid_value"'): "0+50x60",
         server("fovea:requests_total", CHAT): "0+60x60"},
    ),
    Case(
        "FoveaKvCacheFull", SERVER, "99%",
        {server("fovea:kv_blocks_used"): "99x60", server("fovea:kv_blocks_total"): "100x60",
         server("fovea:preemptions_total"): "0+1x60"},
        {server("fovea:kv_blocks_used"): "99x60", server("fovea:kv_blocks_total"): "100x60",
         server("fovea:preemptions_total"): "7x60"},
    ),
    Case(
        "FoveaEncoderCacheThrash", SERVER, "2",
        {server("fovea:embed_cache_evictions_total"): "0+120x60",
         server("fovea:embed_cache_hits_total"): "0+6x60"},
        {server("fovea:embed_cache_evictions_total"): "0+120x60",
         server("fovea:embed_cache_hits_total"): "0+60x60"},
    ),
    Case(
        "FoveaDiskTierOff", SERVER, "1",
        {server("fovea:embed_disk_off"): "1x60"}, {server("fovea:embed_disk_off"): "0x60"},
    ),
    Case(
        "FoveaDiskTierDamaged", SERVER, "2",
        {server("fovea:embed_disk_corrupt_total"): "0x15 2x20"},
        {server("fovea:embed_disk_corrupt_total"): "2x120"},
    ),
    Case(
        "FoveaDecoderCrashes", SERVER, "10",
        {server("fovea:decoder_crashes_total"): "0+1x60"},
        {server("fovea:decoder_crashes_total"): "0x15 2x20"},
    ),
    Case(
        "FoveaFailedSteps", SERVER, "10",
        {server("fovea:failed_steps_total"): "0+1x60"}, {server("fovea:failed_steps_total"): "0x15 2x20"},
    ),
    Case(
        "FoveaIntegrityErrors", SERVER, "1",
        {server("fovea:integrity_errors_total"): "0x15 1x20"},
        {server("fovea:integrity_errors_total"): "0x120"},
    ),
    Case(
        "FoveaKeysFileBroken", SERVER, "1",
        {server("fovea:keys_file_broken"): "1x60"}, {server("fovea:keys_file_broken"): "0x60"},
    ),
    Case(
        "FoveaTraceSpansDropped", SERVER, "1",
        {server("fovea:trace_spans_dropped_total"): "0+60x60"},
        {server("fovea:trace_spans_dropped_total"): "60x60"},
    ),
)  # fmt: skip
MEMORY = (
    Case(
        "FoveaMemoryNearLimit", SERVER, "95%",
        {server("process_resident_memory_bytes"): "95x60", server("cgroup_memory_limit_bytes"): "100x60"},
        {server("process_resident_memory_bytes"): "90x60", server("cgroup_memory_limit_bytes"): "100x60"},
    ),
    Case(
        "FoveaMemoryGrowing", SERVER, "1.60",
        {server("process_resident_memory_bytes"): "1000x60 1000+2x600"},
        {server("process_resident_memory_bytes"): "1000x360 1500x300"}, at="420m",
    ),
    Case(
        "FoveaDeviceMemoryNearlyFull", {**SERVER, "gpu": "0"}, "98%",
        {server("fovea:device_memory_used_bytes", 'gpu="0"'): "98x60",
         server("fovea:device_memory_total_bytes", 'gpu="0"'): "100x60"},
        {server("fovea:device_memory_used_bytes", 'gpu="0"'): "97x60",
         server("fovea:device_memory_total_bytes", 'gpu="0"'): "100x60"},
    ),
)  # fmt: skip
