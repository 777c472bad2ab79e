"""The log of slow requests: those over a threshold, with their stages and the reasons for their time.

A row holds times, sizes of images and counts. It never holds text, bytes or query strings.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fovea.observe.trail import Run, Trail

log = logging.getLogger("fovea.slow")
MOST_ROWS = 100
"""Most rows that are kept for the admin page."""
MOST_IMAGES = 16
"""Most images in a row."""
LARGE_SHARE = 0.25
"""A stage that takes this share of a request's time, or more, is named as a reason."""
_CAUSES = {
    "receive": "the request arrived slowly, or was large to parse",
    "fetch": "its images came from slow hosts",
    "media_decode": "its images or videos took long to decode",
    "preprocess": "its images took long to resize, or waited for a thread that does it",
    "queue": "it waited for its turn: other requests held the engine or its memory",
    "encode": "its images took long to encode",
    "prefill": "its prompt took long to compute, or shared steps with other prompts",
    "decode": "its answer was long, or shared steps with many others",
    "detokenize": "its tokens took long to become text",
    "respond": "the client read its answer slowly",
}


class SlowRequests:
    """The latest slow requests.

    total_s: a request that takes so many seconds is slow; 0: none is.
    ttft_s: a request whose first token takes so many seconds is slow; 0: none is.
    """

    def __init__(self, total_s: float, ttft_s: float) -> None:
        self._total_s = total_s
        self._ttft_s = ttft_s
        self._rows: deque[dict[str, Any]] = deque(maxlen=MOST_ROWS)

    def is_slow(self, total_s: float, ttft_s: float | None) -> bool:
        """Tell whether a request was slow. ttft_s: seconds to its first token; None: it got none."""
        if self._total_s and total_s >= self._total_s:
            return True
        return bool(self._ttft_s and ttft_s is not None and ttft_s >= self._ttft_s)

    def add(self, row: dict[str, Any]) -> None:
        """Keep and log a slow request."""
        self._rows.append(row)
        log.warning("slow request: %s", json.dumps(row), extra={"event": "slow request", "fields": row})

    def rows(self) -> list[dict[str, Any]]:
        """Return the kept rows, the latest first."""
        return list(reversed(self._rows))


def row_of(
    trail: Trail, ended: float, *, request_id: str, route: str, caller: str, status: int
) -> dict[str, Any]:
    """Return the row of one request."""
    stages: dict[str, float] = {}
    for interval in trail.longest().stages(ended):
        stages[interval.stage] = stages.get(interval.stage, 0.0) + interval.seconds
    total, ttft = ended - trail.started, ttft_of(trail)
    usage = [run.usage for run in trail.runs if run.usage is not None]
    return {
        "time": datetime.fromtimestamp(trail.wall, UTC).isoformat(timespec="milliseconds"),
        "request_id": request_id,
        "trace_id": trail.trace_id,
        "route": route,
        "status": status,
        "model": trail.runs[0].model if trail.runs else "",
        "caller": caller,
        "seconds": round(total, 4),
        "ttft_seconds": None if ttft is None else round(ttft, 4),
        "stages": {name: round(seconds, 4) for name, seconds in stages.items()},
        "prompt_tokens": sum(each.prompt for each in usage),
        "cached_tokens": sum(each.cached for each in usage),
        "completion_tokens": sum(each.completion for each in usage),
        "images": [image for run in trail.runs for image in _images(run)][:MOST_IMAGES],
        "reasons": reasons(stages, total, trail.runs),
    }


def ttft_of(trail: Trail) -> float | None:
    """Return the seconds to the first token of the slowest generation; None: none got a token."""
    firsts = [run.first - trail.started for run in trail.runs if run.first is not None]
    return max(firsts, default=None)


def reasons(stages: Mapping[str, float], total: float, runs: Sequence[Run]) -> list[str]:
    """Say why a request took its time, the largest part first.

    stages: seconds by stage.
    total: seconds of the request.
    runs: its generations; none: it failed before the engine got it, or its route generates nothing.
    """
    usage = [run.usage for run in runs if run.usage is not None]
    found = stage_reasons(stages, total, _CAUSES)
    prompt, cached = sum(each.prompt for each in usage), sum(each.cached for each in usage)
    if prompt >= 1024 and cached < prompt / 2:
        found.append(f"{prompt - cached} of {prompt} prompt tokens were not cached")
    visual = sum(image.tokens for run in runs for image in run.images)
    if visual >= 1024:
        found.append(f"its images have {visual} visual tokens")
    if len(usage) < len(runs):
        found.append("it ended before its answer was complete")
    return found


def stage_reasons(stages: Mapping[str, float], total: float, causes: Mapping[str, str]) -> list[str]:
    """Return a sentence for each stage that took a large share of a request's time, the longest first.

    stages: seconds by stage.
    total: seconds of the request.
    causes: what makes a stage slow, by stage.
    """
    return [
        f"{name} took {seconds:.3g} s ({seconds / total:.0%}): {causes[name]}"
        for name, seconds in sorted(stages.items(), key=lambda item: -item[1])
        if total > 0 and seconds >= LARGE_SHARE * total
    ]


def _images(run: Run) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for index, (width, height) in enumerate(run.sizes):
        row: dict[str, Any] = {"width": width, "height": height}
        if index < len(run.images):
            use = run.images[index]
            row |= {"tokens": use.tokens, "detail": use.detail, "detail_reason": use.reason}
        rows.append(row)
    return rows
