"""What spans say about a stretch of time: how long each stage was at work, and what the time went by with.

Two questions, because stages overlap. *Busy* seconds of a stage are those of all its spans, less what is nested in them;
under load several threads are busy at once. *Path* seconds share out the time itself: every moment belongs to one stage,
where several are at work to the one that holds up the others most (`ON_PATH`), where none is, to "waiting".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fovea.core.stage import Span

STAGES = (
    "client", "server", "fetch", "image decode", "tokenize", "resize", "patchify", "schedule", "encoder", "projector",
    "prefill", "mixed step", "decode step", "head", "sampling", "detokenize",
)  # fmt: skip
"""In the order in which a request meets them: the names of all spans."""
WAITING = "waiting"
"""Nobody is at work: a thread is being woken, or a socket passes bytes on."""
ON_PATH = (
    "projector", "encoder", "head", "sampling", "prefill", "mixed step", "decode step", "detokenize", "schedule", "resize",
    "patchify", "tokenize", "image decode", "fetch", "server", "client",
)  # fmt: skip
"""The model goes first, then its thread, then what makes its input, then what passes text on."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """calls: spans that began in the time. busy_s, path_s: seconds, as above."""

    stage: str
    calls: int
    busy_s: float
    path_s: float


def stage_times(spans: Iterable[Span], start: float, end: float) -> dict[str, StageTime]:
    """The stages that were at work in [start, end), in the order of STAGES, and "waiting" last."""
    within = [span for span in spans if span.start < end and span.end > start]
    segments = [
        (name, max(a, start), min(b, end)) for name, a, b in innermost(within) if a < end and b > start
    ]
    calls = Counter(span.name for span in within if span.start >= start)
    busy: dict[str, float] = defaultdict(float)
    for name, a, b in segments:
        busy[name] += b - a
    path = _path(segments, start, end)
    found = {name: StageTime(name, calls[name], busy[name], path[name]) for name in STAGES if name in busy}
    return found | {WAITING: StageTime(WAITING, 0, path[WAITING], path[WAITING])}


def innermost(spans: Iterable[Span]) -> list[tuple[str, float, float]]:
    """(name, start, end) of the innermost span, thread by thread: pieces that do not overlap within a thread."""
    threads: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        threads[span.thread].append(span)
    pieces: list[tuple[str, float, float]] = []
    for own in threads.values():
        pieces += _pieces(sorted(own, key=lambda span: (span.start, -span.end)))
    return [piece for piece in pieces if piece[2] > piece[1]]


def _pieces(spans: Sequence[Span]) -> Iterable[tuple[str, float, float]]:
    """spans of one thread, outer ones before inner ones."""
    around: list[Span] = []
    at = 0.0
    for span in spans:
        while around and around[-1].end <= span.start:
            yield around[-1].name, at, around[-1].end
            at = around.pop().end
        if around:
            yield around[-1].name, at, span.start
        around.append(span)
        at = span.start
    while around:
        yield around[-1].name, at, around[-1].end
        at = around.pop().end


def _path(segments: Iterable[tuple[str, float, float]], start: float, end: float) -> dict[str, float]:
    changes = [(at, name, step) for name, a, b in segments for at, step in ((a, 1), (b, -1))]
    active: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    now = start
    for at, name, step in sorted(changes):
        seconds[_first(active)] += at - now
        active[name] += step
        now = at
    seconds[_first(active)] += end - now
    return seconds


def _first(active: Counter[str]) -> str:
    return next((name for name in ON_PATH if active[name] > 0), WAITING)
