"""Caches: the bytes of each against its ceiling, its hits and evictions, and the tiers of encoder outputs."""

from __future__ import annotations

from typing import NamedTuple

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards.page import SERVER_LABELS, Row, page
from tools.dashboards.panels import RATE, SERVERS, AnyPanel, Query, Unit, gauge_of, lines, rate


class Cache(NamedTuple):
    """A cache, by the names of its metrics.

    name: first part of the names of its counters `_hits`, `_misses` and `_evictions`.
    used, ceiling: gauges in bytes.
    losses: further counters of entries that it lost.
    """

    title: str
    text: str
    name: str
    used: str
    ceiling: str
    losses: tuple[str, ...] = ("evictions", "expired")


OUTPUTS = Cache(
    "Encoder outputs", "Visual tokens of images, in the memory of the device.",
    "embed_cache", "embed_cache_bytes", "embed_cache_capacity_bytes",
)  # fmt: skip
TIERS = (
    Cache(
        "Encoder outputs in host memory", "Those that the device had no room for.",
        "embed_host", "embed_host_bytes", "embed_host_capacity_bytes", ("evictions", "expired", "dropped"),
    ),
    Cache(
        "Encoder outputs on disk", "They outlive the process. Corrupt files are removed, never used.",
        "embed_disk", "embed_disk_bytes", "embed_disk_capacity_bytes",
        ("evictions", "expired", "dropped", "corrupt"),
    ),
)  # fmt: skip
OTHERS = (
    Cache(
        "Regions", "Encoded regions of images, the least relevant are evicted first.",
        "region_cache", "region_cache_bytes", "region_cache_capacity_bytes", ("evictions",),
    ),
    Cache(
        "Processed pixels", "Images that were resized and normalised.",
        "pixel_cache", "pixel_cache_bytes", "pixel_cache_capacity_bytes",
    ),
    Cache(
        "Decoded images", "Pixels of images before they are resized.",
        "decoded_cache", "decoded_cache_bytes", "decoded_cache_capacity_bytes",
    ),
    Cache(
        "Downloads", "Bytes of images behind URLs.",
        "fetch_cache", "fetch_cache_bytes", "fetch_cache_capacity_bytes",
    ),
    Cache(
        "Uploaded images", "Images that clients sent to /v1/images.",
        "image_store", "image_store_bytes", "image_store_capacity_bytes",
    ),
    Cache(
        "Kept answers", "Answers of /v1/responses that later requests continue.",
        "response_store", "response_store_bytes", "response_store_capacity_bytes",
    ),
)  # fmt: skip


def caches() -> Dashboard:
    """Return the dashboard."""
    return page(
        "caches",
        "Fovea: caches",
        "How full each cache is, how often it helps, and what it loses.",
        SERVER_LABELS,
        [
            _blocks(),
            (
                "Encoder outputs and their tiers",
                [each for tier in (OUTPUTS, *TIERS) for each in _cache(tier)],
            ),
            ("Tiers", _tiers()),
            ("Other caches", [each for cache in OTHERS for each in _cache(cache)]),
            _states(),
        ],
    )


def _cache(cache: Cache) -> list[AnyPanel]:
    """Return the panels of one cache: bytes, hit rate, losses."""
    name = f"fovea:{cache.name}"
    return [
        lines(
            f"{cache.title}: bytes", f"{cache.text} Bytes in use and the ceiling.", Unit.BYTES,
            gauge_of(f"fovea:{cache.used}", "used {{instance}}"),
            gauge_of(f"fovea:{cache.ceiling}", "ceiling {{instance}}"),
        ),
        lines(
            f"{cache.title}: hit rate", "Share of the lookups that found an entry. Empty without lookups.",
            Unit.SHARE, _hit_rate(f"{name}_hits_total", f"{name}_misses_total", "hits"), most=1,
        ),
        lines(
            f"{cache.title}: losses", "Entries per second that were lost for lack of room or for their age.",
            Unit.PER_SECOND, *(rate(f"{name}_{loss}_total", loss) for loss in cache.losses),
        ),
    ]  # fmt: skip


def _hit_rate(hits: str, misses: str, legend: str) -> Query:
    found, lost = (f"sum(rate({name}{{{SERVERS}}}{RATE}))" for name in (hits, misses))
    return Query(f"{found} / ({found} + {lost})", legend)


def _blocks() -> Row:
    tokens = (f"sum(rate(fovea:prefix_{kind}_tokens_total{{{SERVERS}}}{RATE}))" for kind in ("hit", "query"))
    return (
        "KV blocks and prefixes",
        [
            lines(
                "KV blocks", "Blocks that running requests hold, blocks of the prefix cache, and all.",
                Unit.COUNT, gauge_of("fovea:kv_blocks_used", "used {{instance}}"),
                gauge_of("fovea:kv_blocks_cached", "cached {{instance}}"),
                gauge_of("fovea:kv_blocks_total", "all {{instance}}"),
            ),
            lines(
                "Prefix cache: hit rate", "Share of the tokens of prompts whose KV was cached.", Unit.SHARE,
                Query(" / ".join(tokens), "tokens"), most=1,
            ),
            lines(
                "KV: losses", "Evicted blocks, and requests that lost their blocks and start again.",
                Unit.PER_SECOND, rate("fovea:kv_evictions_total", "evicted blocks"),
                rate("fovea:preemptions_total", "preempted requests"),
            ),
            lines(
                "KV blocks of images", "Blocks that hold a part of an image.", Unit.COUNT,
                gauge_of("fovea:kv_blocks_used_visual", "used {{instance}}"),
                gauge_of("fovea:kv_blocks_cached_visual", "cached {{instance}}"),
            ),
            lines(
                "KV in host memory", "Image prefixes that were copied out of the pool.", Unit.COUNT,
                gauge_of("fovea:kv_host_blocks", "used {{instance}}"),
                gauge_of("fovea:kv_host_blocks_total", "all {{instance}}"),
            ),
            lines(
                "KV in host memory: moves", "Blocks that were copied back, and blocks that were evicted.",
                Unit.PER_SECOND, rate("fovea:kv_host_loads_total", "copied back"),
                rate("fovea:kv_host_evictions_total", "evicted"),
            ),
        ],
    )  # fmt: skip


def _tiers() -> list[AnyPanel]:
    return [
        lines(
            "Where encoder outputs are found",
            "Lookups per second by the tier that had the output. What no tier has is encoded.",
            Unit.PER_SECOND, rate("fovea:embed_cache_hits_total", "device"),
            rate("fovea:embed_host_hits_total", "host memory"), rate("fovea:embed_disk_hits_total", "disk"),
            rate("fovea:images_encoded_total", "encoded"), stacked=True,
        ),
        lines(
            "Outputs on their way", "Bytes that wait to be copied to host memory or written to disk.",
            Unit.BYTES, gauge_of("fovea:embed_host_leaving_bytes", "to host memory {{instance}}"),
            gauge_of("fovea:embed_disk_leaving_bytes", "to disk {{instance}}"),
        ),
        lines(
            "Disk tier", "1: the disk failed and is no longer used. Writes per second.", Unit.COUNT,
            gauge_of("fovea:embed_disk_off", "off {{instance}}"),
            rate("fovea:embed_disk_writes_total", "writes per second"),
        ),
    ]  # fmt: skip


def _states() -> Row:
    return (
        "States, windows and grammars",
        [
            lines(
                "States", "Slots for states of layers without KV: in use, checkpoints, all.", Unit.COUNT,
                gauge_of("fovea:state_slots_used", "used {{instance}}"),
                gauge_of("fovea:state_checkpoints", "checkpoints {{instance}}"),
                gauge_of("fovea:state_slots_total", "all {{instance}}"),
            ),
            lines(
                "Blocks of windows", "KV blocks of layers with a sliding window.", Unit.COUNT,
                gauge_of("fovea:window_blocks_used", "used {{instance}}"),
                gauge_of("fovea:window_blocks_total", "all {{instance}}"),
            ),
            lines(
                "Answer formats", "Formats that were known, and that had to be compiled.", Unit.PER_SECOND,
                rate("fovea:grammar_hits_total", "known"), rate("fovea:grammar_misses_total", "compiled"),
            ),
        ],
    )  # fmt: skip
