"""Images: what loading and encoding them costs, and how relevance divides the visual tokens."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards.page import SERVER_LABELS, Row, page
from tools.dashboards.panels import (
    RATE,
    SERVERS,
    Query,
    Unit,
    buckets,
    gauge_of,
    lines,
    mean,
    quantiles,
    rate,
)

STAGES = (
    ("fetch", "Fetch", "Downloading images behind URLs. Cached ones take no time."),
    ("media_decode", "Decode", "Decoding JPEG, PNG and other formats in a process of its own."),
    ("preprocess", "Preprocess", "Resizing and normalising pixels in worker threads."),
    ("queue", "Queue", "Waiting for blocks, for other requests, and for images to be encoded."),
    ("encode", "Encode", "The vision encoder, projector included. Cached images take no time."),
)


def images() -> Dashboard:
    """Return the dashboard."""
    return page(
        "images",
        "Fovea: images",
        "What images cost from their download to their visual tokens, and how relevance divides the tokens "
        "among regions.",
        SERVER_LABELS,
        [_stages(), _encoder(), _relevance(), _media()],
    )


def _stages() -> Row:
    panels = [
        lines(
            title, f"{text} Half, 95% and 99% of the requests take less.", Unit.SECONDS,
            *quantiles("fovea:stage_seconds", where=f'{SERVERS}, stage="{stage}"'),
        )
        for stage, title, text in STAGES
    ]  # fmt: skip
    projector = lines(
        "Projector", "Mapping features into the decoder's space, per image. Encoders that were built ahead "
        "have no such step of their own.",
        Unit.SECONDS, *quantiles("fovea:image_project_seconds"),
    )  # fmt: skip
    return "Stages of an image", [*panels, projector]


def _encoder() -> Row:
    engines = "fovea:encoder_engine"
    hits, misses = (f"sum(rate({engines}_{kind}_total{{{SERVERS}}}{RATE}))" for kind in ("hits", "misses"))
    return (
        "Encoder",
        [
            lines(
                "Images per second", "Images of requests, images that were encoded, and videos.",
                Unit.PER_SECOND, rate("fovea:images_total", "in requests"),
                rate("fovea:images_encoded_total", "encoded"), rate("fovea:videos_total", "videos"),
            ),
            lines(
                "Time in the encoder per image", "Projector included.", Unit.SECONDS,
                *quantiles("fovea:image_encode_seconds"),
            ),
            lines(
                "Encoder in use", "Share of time in which the encoder computed.", Unit.SHARE,
                rate("fovea:encode_seconds_total", "{{instance}}", "instance"),
            ),
            lines(
                "Built encoders", "Encoders that were built ahead and are loaded, one per grid.", Unit.COUNT,
                gauge_of("fovea:encoder_engines"),
            ),
            lines(
                "Images with a built encoder",
                "Share of the encoded images for whose grid a built encoder was used.", Unit.SHARE,
                Query(f"{hits} / ({hits} + {misses})", "built encoder"), most=1,
            ),
            lines(
                "Images that wait to be encoded", "Requests that wait for one of their images.", Unit.COUNT,
                gauge_of("fovea:requests_waiting_image"),
            ),
        ],
    )  # fmt: skip


def _relevance() -> Row:
    return (
        "Relevance and tokens of regions",
        [
            buckets(
                "Relevance of regions", "How relevant the regions of images are, from 0 to 1. Only images "
                "that are encoded by region count.",
                Unit.COUNT, "arr_coc_relevance_score_dist",
            ),
            buckets(
                "Visual tokens of a region", "How many visual tokens regions get, from 64 to 400.",
                Unit.COUNT, "arr_coc_token_allocation",
            ),
            lines(
                "Mean tokens per region", "Of the last image that was encoded by region, and of all.",
                Unit.COUNT, gauge_of("arr_coc_avg_tokens_per_patch", "last image {{instance}}"),
                mean("arr_coc_token_allocation", "all images"),
            ),
            lines(
                "Scores of the last image", "Means of its three maps: what it holds, what stands out, and "
                "what the question is about.",
                Unit.COUNT, gauge_of("arr_coc_propositional_score", "propositional {{instance}}"),
                gauge_of("arr_coc_perspectival_score", "perspectival {{instance}}"),
                gauge_of("arr_coc_participatory_score", "participatory {{instance}}"),
            ),
            lines(
                "Balance of opposites", "Of the last image. Each lies between two aims, such as few tokens "
                "and much detail.",
                Unit.COUNT, gauge_of("arr_coc_opponent_processing_balance", "{{tension}} {{instance}}"),
            ),
            lines(
                "Time to allot tokens", "Balancing and attending of one image.", Unit.MILLISECONDS,
                *quantiles("arr_coc_lod_allocation_time_ms"),
            ),
        ],
    )  # fmt: skip


def _media() -> Row:
    return (
        "Media in flight",
        [
            lines(
                "Bytes of media", "Encoded images and videos of requests in flight, and their ceiling.",
                Unit.BYTES, gauge_of("fovea:media_held_bytes", "held {{instance}}"),
                gauge_of("fovea:media_held_capacity_bytes", "ceiling {{instance}}"),
            ),
            lines(
                "Bytes of bodies", "Bodies that arrive or whose images are not read yet, and their ceiling.",
                Unit.BYTES, gauge_of("fovea:body_bytes", "held {{instance}}"),
                gauge_of("fovea:body_capacity_bytes", "ceiling {{instance}}"),
            ),
            lines(
                "Decoding processes", "Processes, those that died, and those that the server ended.",
                Unit.COUNT, gauge_of("fovea:decoder_processes", "running {{instance}}"),
                rate("fovea:decoder_crashes_total", "crashes per second"),
                rate("fovea:decoder_ended_total", "ended per second"),
            ),
        ],
    )  # fmt: skip
