"""Alerts on symptoms of a server: it does not answer, its queue grows, its caches or its media tools fail."""

from __future__ import annotations

from fovea.deploy.monitoring.recording import JOBS, ROUTES
from fovea.deploy.monitoring.rule import Alert, Condition

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
