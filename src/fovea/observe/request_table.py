"""The table of the metrics that are recorded as requests proceed: names, labels, buckets and help texts.

Names get the prefix `fovea:`, and counters the suffix `_total`. Metrics of relevance realization have none.
"""

from __future__ import annotations

from typing import NamedTuple

from fovea.observe.table import Buckets


class Total(NamedTuple):
    """A counter that the server increments.

    text: help text.
    labels: names of its labels.
    """

    text: str
    labels: tuple[str, ...] = ()


class Spread(NamedTuple):
    """A histogram.

    text: help text.
    buckets: upper bounds of the buckets.
    label: name of its only label; "" if it has none.
    """

    text: str
    buckets: Buckets
    label: str = ""


# Metrics of relevance realization, with the names of the ARR-COC documents. Prometheus recommends seconds,
# but one of these names says milliseconds.
RELEVANCE_GAUGES = {
    "arr_coc_avg_tokens_per_patch": "visual tokens per region of the last image that was encoded by region",
    "arr_coc_propositional_score": "mean of the propositional map of the last image encoded by region",
    "arr_coc_perspectival_score": "mean of the perspectival map of the last image encoded by region",
    "arr_coc_participatory_score": "mean of the participatory map of the last image encoded by region",
}
TENSION_GAUGE = "arr_coc_opponent_processing_balance"
TENSION_TEXT = "a tension from 0 to 1; 1 is the first side of the pair"
TENSIONS = ("compress_particularize", "exploit_explore", "focus_diversify")
RELEVANCE_SPREADS: dict[str, tuple[str, Buckets]] = {
    "arr_coc_relevance_score_dist": ("relevance of regions", tuple(step / 10 for step in range(1, 11))),
    "arr_coc_token_allocation": ("visual tokens allotted to a region", (0, 16, 64, 128, 200, 256, 400)),
    "arr_coc_lod_allocation_time_ms": (
        "milliseconds in which the relevance of an image was turned into tokens of its regions",
        (0.25, 0.5, 1, 2, 4, 8, 16, 32),
    ),
}
INFO_TEXT = "always 1; the labels name the served model and Fovea's version"
INFO_LABELS = ("model", "version")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
STAGES = ("fetch", "media_decode", "preprocess", "queue", "encode", "prefill", "decode", "detokenize")
TOTALS = {
    "requests": Total("finished HTTP requests", ("route", "status")),
    "answers_begun": Total("requests that were handed to the engine"),
    "refused": Total("requests refused, by error code", ("code",)),
    "denied": Total("requests refused with 401 or 403, by reason", ("reason",)),
    "connections_refused": Total(
        "connections and requests refused before any route, or closed to make room, by reason", ("reason",)
    ),
    "connection_timeouts": Total("connections closed because the client was too slow", ("kind",)),
    "ignored_fields": Total("unknown fields of requests that were ignored"),
    "images": Total("images in requests"),
    "videos": Total("videos in requests"),
    "tokens": Total("tokens by kind; cached and image are parts of prompt", ("kind",)),
    "finished": Total("answers by finish reason; abort: the client left", ("reason",)),
}
SPREADS = {
    "request_seconds": Spread("duration of a request from its first to its last byte", SECONDS, "route"),
    "ttft_seconds": Spread(
        "time from arrival to first token, loading of images included, of every request that got one",
        SECONDS,
    ),
    "itl_seconds": Spread("time between two tokens of an answer", SECONDS),
    "tpot_seconds": Spread("mean time between two tokens of an answer, once per request", SECONDS),
    "answer_seconds": Spread("time from arrival at the engine to the last token", SECONDS),
    "response_seconds": Spread("time from arrival to the last token, loading of images included", SECONDS),
    "inference_seconds": Spread("seconds of prefill and decode of a request", SECONDS),
    "stage_seconds": Spread("seconds per stage of a request", SECONDS, "stage"),
    "prompt_tokens": Spread("tokens of a prompt", TOKENS),
    "computed_prompt_tokens": Spread("tokens of a prompt that were not cached", TOKENS),
    "answer_tokens": Spread("tokens of an answer, all choices", TOKENS),
    "choices": Spread("choices that a request asks for (n)", (1, 2, 5, 10, 20)),
    "max_tokens": Spread("length limit of an answer, if the request sets one", TOKENS),
}
