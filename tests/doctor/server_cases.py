"""Servers, settings and monitoring with one fault each, and the verdicts that they get."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fovea.doctor.check import Status
from fovea.doctor.server import Answer
from fovea.doctor.subject import Subject
from tests.doctor.case import Case, case
from tests.doctor.fakes import (
    GIB,
    METRICS,
    FakeMachine,
    FakeWeb,
    error,
    live,
    raising,
    reply,
    settings,
    subject,
)

PASS, WARN, FAIL, NONE = Status.PASS, Status.WARN, Status.FAIL, Status.NOT_APPLICABLE
FOREIGN = {"id": "other", "owned_by": "vllm"}
CHAT = "/v1/chat/completions"
ALL_PATHS = ("/health", "/ready", "/v1/models", "/admin/caches", "/metrics", CHAT)


def chat(route: Answer | Callable[[Any], Answer | None]) -> partial[Subject]:
    """A server that answers chats in another way."""
    return partial(subject, FakeWeb(routes={CHAT: route}))


def metered(**changes: float) -> partial[Subject]:
    """A server with other metrics."""
    return partial(subject, FakeWeb(metrics={**METRICS, **{f"fovea:{k}": v for k, v in changes.items()}}))


def setting(**changes: object) -> partial[Subject]:
    """A subject with other settings."""
    return partial(subject, settings=settings(**changes))


def never_cached(body: Any) -> Answer:
    counts = {"prompt_tokens": 60, "prompt_tokens_details": {"cached_tokens": 0}}
    return reply({"choices": [{"message": {"content": "It is red."}}], "usage": counts})


class Collecting(FakeWeb):
    """A proxy that sends streams in one piece."""

    def request(self, *words: Any, **fields: Any) -> Answer:
        on_data = fields.pop("on_data", None)
        answer = super().request(*words, **fields)
        for _ in range(2 if on_data is not None else 0):
            on_data()
        return answer


def collected(seconds: float) -> Subject:
    """A server behind such a proxy. Between two readings of the clock, these seconds pass."""
    ticks = itertools.count(0.0, seconds)
    return subject(Collecting(), clock=lambda: next(ticks))


def fetches(body: Any) -> Answer | None:
    """A server that fetches images from everywhere."""
    content = body["messages"][0]["content"]
    if isinstance(content, list) and not content[0]["image_url"]["url"].startswith("data:"):
        url = content[0]["image_url"]["url"]
        if url.startswith("http://127.0.0.1:"):
            import httpx

            httpx.get(url, trust_env=False)
        return reply({"choices": [{"message": {"content": "a cat"}}]})
    return None


def unsure(body: Any) -> Answer:
    return error(400, "connection refused", {})


TEXT = reply({"choices": [{"message": {"content": "no JSON"}}]})
WITHOUT_USAGE = Answer(200, b"data: {}\n\ndata: [DONE]\n\n")
OUTSIDE = FakeMachine(own_addresses=("192.0.2.7",), reachable=True)
MANY = {"stages": {"encoder": {"hits": 1, "evictions": 5000}, "kv": {"evictions": 9999}}}
ANSWERS = [
    case("answers/text", PASS, subject, "4 tokens"),
    case("answers/text", FAIL, chat(error(500, "a defect", {})), "a defect"),
    case("answers/text", FAIL, chat(raising("connection reset")), "connection reset"),
    case("answers/text", FAIL, chat(Answer(200, b"{}")), "status 200"),
    case("answers/image", PASS, subject, "49 of them visual"),
    case("answers/image", FAIL, chat(error(400, "no images here", {})), "no images here"),
    case("answers/stream", PASS, subject, "7 events"),
    case("answers/stream", FAIL, chat(Answer(200, b"data: {}\n\n")), "broke off"),
    case("answers/stream", WARN, partial(collected, 0.5), "7 events in one piece after 0.5 s"),
    case("answers/stream", PASS, partial(collected, 0.1), "7 events"),
    case("answers/stream", FAIL, chat(error(500, "a defect", {})), "a defect"),
    case("answers/usage", PASS, subject, "sent"),
    case("answers/usage", WARN, chat(WITHOUT_USAGE), "cannot charge"),
    case("answers/usage", FAIL, chat(error(400, "no streams", {})), "no streams"),
    case("answers/image-cache", PASS, subject, "40 of 60"),
    case("answers/image-cache", WARN, chat(never_cached), "0 of 60"),
    case("answers/image-cache", NONE, chat(TEXT), "does not tell"),
    case("answers/image-cache", FAIL, chat(error(500, "a defect", {})), "a defect"),
    case("answers/schema", PASS, subject, "blue"),
    case("answers/schema", FAIL, chat(TEXT), "does not follow"),
    case("answers/schema", FAIL, chat(reply({"choices": [{"message": {"content": '{"blue": 1}'}}]}))),
    case("answers/schema", FAIL, chat(error(401, "no key", {})), "--api-key"),
    case("answers/schema", WARN, chat(error(400, "unknown field", {})), "unknown field"),
]
CACHES = [
    case("caches/kv-pool", PASS, subject, "1394 requests of 376 tokens"),
    case("caches/kv-pool", FAIL, metered(kv_blocks_total=8), "not one request"),
    case("caches/kv-pool", WARN, metered(kv_blocks_total=400), "whole context"),
    case("caches/kv-pool", WARN, metered(kv_blocks_total=600), "--kv-cache-mib 59, or --max-running 25"),
    case("caches/kv-pool", NONE, partial(subject, FakeWeb(card=FOREIGN))),
    case("caches/encoder-outputs", PASS, subject, "256.0 MiB, or 2684 images"),
    case("caches/encoder-outputs", WARN, metered(embed_cache_capacity_bytes=0), "encoded again"),
    case("caches/encoder-outputs", WARN, metered(embed_cache_capacity_bytes=300_000), "or 3 images"),
    case("caches/encoder-outputs", NONE, metered(embed_cache_entries=0), "not known"),
    case("caches/encoder-outputs", NONE, partial(subject, FakeWeb(card=FOREIGN))),
    case("caches/evictions", PASS, subject, "5 hits, 2 evictions"),
    case(
        "caches/evictions", WARN, partial(subject, FakeWeb(routes={"/admin/caches": reply(MANY)})), "encoder"
    ),
    case("caches/evictions", NONE, partial(subject, FakeWeb(routes={"/admin/caches": Answer(404)}))),
    case("caches/disk", PASS, subject, "0 damaged"),
    case("caches/disk", FAIL, metered(embed_disk_off=1), "turned itself off"),
    case("caches/disk", WARN, metered(embed_disk_corrupt_total=2), "2 damaged"),
    case("caches/disk", NONE, metered(embed_disk_capacity_bytes=0)),
    case("caches/media-bytes", PASS, subject, "1.0 GiB of media"),
    case(
        "caches/media-bytes",
        WARN,
        partial(subject, machine=FakeMachine(free=GIB // 2)),
        "--max-media-mib 256",
    ),
    case("caches/media-bytes", NONE, live, "--config FILE"),
]
LIMITS = [
    case("limits/keys", PASS, subject, "2 keys"),
    case("limits/keys", PASS, setting(api_keys=(), keys_file=Path("/keys.toml")), "/keys.toml"),
    case("limits/keys", FAIL, setting(api_keys=("word",)), "fovea keys new"),
    case("limits/keys", FAIL, setting(api_keys=(), host="0.0.0.0"), "every machine"),
    case("limits/keys", WARN, setting(api_keys=()), "this machine"),
    case("limits/keys-file", NONE, subject),
    case("limits/keys-file", FAIL, setting(keys_file=Path("/keys.toml")), "does not exist"),
    *(
        case(
            "limits/keys-file",
            status,
            partial(setting(keys_file=Path("/k")), machine=FakeMachine(modes={"/k": mode})),
            words,
        )
        for mode, status, words in ((0o600, PASS, "600"), (0o644, WARN, "chmod 600 /k"))
    ),
    case("limits/admin-key", PASS, subject),
    case("limits/admin-key", WARN, setting(admin_keys=()), "FOVEA_ADMIN_KEY"),
    case("limits/admin-key", NONE, setting(admin_keys=(), api_keys=())),
    case("limits/queue", PASS, subject, "256"),
    case("limits/queue", FAIL, setting(max_queue=0), "--max-queue"),
    case("limits/request-timeout", PASS, subject, "600 s"),
    case("limits/request-timeout", FAIL, setting(request_timeout=0.0), "for ever"),
    case("limits/drain-time", PASS, subject, "30 s, after 5 s"),
    case("limits/drain-time", FAIL, setting(drain_seconds=0.0), "breaks off"),
    case("limits/drain-time", WARN, setting(lame_duck_s=0.0), "--lame-duck-s"),
    case("limits/decoders", PASS, subject, "images: 3 processes"),
    case("limits/decoders", FAIL, setting(image_workers=0), "--image-workers"),
    case("limits/decoders", FAIL, setting(video_workers=0), "--video-workers"),
    case("limits/image-size", PASS, subject, "50 megapixels in 1024 MiB"),
    case("limits/image-size", WARN, setting(decode_memory_mib=128), "--max-pixels"),
    case("limits/slow-log", PASS, subject, "from 30 s"),
    case("limits/slow-log", WARN, setting(slow_request_s=0.0, slow_ttft_s=0.0), "--slow-request-s"),
]
OPEN = FakeWeb(open_paths=ALL_PATHS)
EXPOSURE = [
    case("exposure/port", PASS, subject, "127.0.0.1 alone"),
    case("exposure/port", PASS, setting(host="0.0.0.0"), "with keys"),
    case("exposure/port", FAIL, setting(host="0.0.0.0", api_keys=()), "without keys"),
    case("exposure/port", PASS, live, "only this machine"),
    case("exposure/port", PASS, partial(live, machine=OUTSIDE), "192.0.2.7: open, and a key"),
    case("exposure/port", FAIL, partial(live, OPEN, machine=OUTSIDE), "192.0.2.7: open, no key"),
    case("exposure/port", FAIL, partial(live, OPEN, url="http://192.0.2.9:8000"), "192.0.2.9"),
    case("exposure/api", PASS, subject, "without a key: 401"),
    case("exposure/api", WARN, partial(subject, OPEN), "on this machine"),
    case("exposure/api", WARN, partial(live, OPEN), "on this machine"),
    case("exposure/api", FAIL, partial(live, OPEN, machine=OUTSIDE), "may use the model"),
    case("exposure/api", FAIL, partial(subject, OPEN, settings=settings(host="0.0.0.0")), "may use"),
    case("exposure/admin", PASS, subject, "401"),
    case("exposure/admin", FAIL, partial(live, OPEN, machine=OUTSIDE), "clear caches"),
    case("exposure/admin", NONE, partial(live, FakeWeb(routes={"/admin/caches": Answer(404)}))),
    case("exposure/metrics", PASS, subject, "401"),
    case("exposure/metrics", FAIL, partial(live, OPEN, machine=OUTSIDE), "how many requests come"),
    case("exposure/private-images", PASS, subject, "403, 403, 403"),
    case("exposure/private-images", FAIL, chat(fetches), "fetched an image"),
    case("exposure/private-images", WARN, chat(unsure), "connection refused"),
    case("exposure/files", PASS, subject, "403"),
    case("exposure/files", FAIL, chat(TEXT), "accepted with 200"),
    case("exposure/files", WARN, setting(file_root=Path("/srv/pictures")), "/srv/pictures"),
    case("exposure/transport", PASS, subject, "loopback"),
    case("exposure/transport", PASS, setting(tls_cert=Path("/cert.pem"), host="0.0.0.0"), "TLS"),
    case("exposure/transport", WARN, setting(host="0.0.0.0"), "--tls-cert"),
    case("exposure/transport", WARN, partial(live, url="http://192.0.2.9:8000"), "plain HTTP"),
    case("exposure/transport", PASS, partial(live, url="https://192.0.2.9:8000"), "TLS"),
    case("exposure/browsers", PASS, subject),
    case(
        "exposure/browsers", WARN,
        partial(subject, FakeWeb(headers={"access-control-allow-origin": "*"})), "every page",
    ),
]  # fmt: skip
PROMETHEUS = "http://prometheus:9090"
RECEIVERS = "/api/v1/alertmanagers"
TARGETS = "/api/v1/targets?state=active"


def watched(routes: dict[str, Any], **changes: Any) -> partial[Subject]:
    """A live server beside a Prometheus that answers as these routes say."""
    return partial(live, FakeWeb(routes=routes), prometheus=PROMETHEUS, **changes)


def target(health: str = "up", port: int = 8000) -> dict[str, Any]:
    labels, url = {"job": "fovea"}, f"http://127.0.0.1:{port}/metrics"
    return {
        "labels": labels,
        "scrapeUrl": url,
        "health": health,
        "lastError": "401" if health != "up" else "",
    }


def data(name: str, *items: Any) -> Answer:
    return reply({"status": "success", "data": {name: list(items)}})


def group(name: str, health: str = "ok") -> dict[str, Any]:
    return {"name": name, "rules": [{"name": f"{name}-rule", "health": health, "lastError": "bad label"}]}


RECORDS = ("fovea-objectives", "fovea-rates", "fovea-slo", "fovea-slo-long")
ALERTS = ("fovea-budgets", "fovea-server", "fovea-memory", "fovea-gateway")
GRAFANA = "http://grafana:3000"
UIDS = ("overview", "images", "caches", "gateway", "slo")


def grafana(status: int) -> partial[Subject]:
    """A Grafana that answers for the dashboard of images with a status, and has all others."""
    paths = {f"/api/dashboards/uid/fovea-{uid}": Answer(200) for uid in UIDS}
    paths["/api/dashboards/uid/fovea-images"] = Answer(status)
    return partial(subject, FakeWeb(routes=paths), grafana=GRAFANA)


MONITORING = [
    case("monitoring/metrics", PASS, subject, "names"),
    case("monitoring/metrics", FAIL, partial(subject, FakeWeb(metrics={"up": 1})), "none of them"),
    case("monitoring/metrics", FAIL, partial(subject, FakeWeb(metrics={"fovea:ready": 1})), "fovea:kv_usage"),
    case("monitoring/metrics", FAIL, partial(subject, FakeWeb(routes={"/metrics": Answer(404)})), "404"),
    case("monitoring/scraped", PASS, watched({TARGETS: data("activeTargets", target())}), "1 target up"),
    case(
        "monitoring/scraped", PASS,
        partial(
            subject, FakeWeb(routes={TARGETS: data("activeTargets", target(port=1))}), prometheus=PROMETHEUS
        ),
    ),
    case("monitoring/scraped", FAIL, watched({TARGETS: data("activeTargets", target("down"))}), "401"),
    case("monitoring/scraped", FAIL, watched({TARGETS: data("activeTargets", target(port=9))}), "none"),
    case("monitoring/scraped", FAIL, watched({TARGETS: error(500, "broken", {})}), "broken"),
    case("monitoring/scraped", NONE, subject, "--prometheus URL"),
    *(
        each
        for path, names in (("monitoring/rules", RECORDS), ("monitoring/alerts", ALERTS))
        for each in (
            case(path, PASS, watched({"/api/v1/rules": data("groups", *map(group, names))}), "4 rules in 4"),
            case(path, FAIL, watched({"/api/v1/rules": data("groups", group(names[0]))}), names[1]),
            case(
                path, FAIL,
                watched({"/api/v1/rules": data("groups", *map(partial(group, health="err"), names))}),
                "bad label",
            ),
        )
    ),
    case("monitoring/receivers", PASS, watched({RECEIVERS: data("activeAlertmanagers", {})})),
    case("monitoring/receivers", WARN, watched({RECEIVERS: data("activeAlertmanagers")}), "no one"),
    case("monitoring/dashboards", PASS, grafana(200), "5 of 5"),
    case("monitoring/dashboards", FAIL, grafana(404), "missing: fovea-images"),
    case("monitoring/dashboards", FAIL, grafana(401), "FOVEA_GRAFANA_TOKEN"),
]  # fmt: skip
CASES: list[Case] = [*ANSWERS, *CACHES, *LIMITS, *EXPOSURE, *MONITORING]
