"""The tables of the routing benchmark as Markdown, and its figures for JSON."""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from cost_page import machine
from routing_load import Reply, warm

from fovea.core.markdown import markdown_table
from fovea.core.measure import percentile

numbers_table = functools.partial(markdown_table, numbers=True)

WARM_TARGET, MOVED_TARGET = 0.95, 0.30


@dataclass(frozen=True, slots=True)
class Round:
    """All requests of one policy in one round.

    seconds: from the first request to the last answer.
    cpu_s: processor time of all engines.
    counted: what the counters of all engines grew by.
    """

    policy: str
    replies: list[Reply]
    seconds: float
    cpu_s: float
    counted: dict[str, float]


@dataclass(frozen=True, slots=True)
class Added:
    """Times to the first text of a known image in seconds.

    cpu_s: processor time of the gateway for each request.
    body: characters of the image's data: URL.
    """

    direct: list[float]
    through: list[float]
    cpu_s: float
    body: int


@dataclass(frozen=True, slots=True)
class Kill:
    """The four passes over all images of the part `kill`.

    killed: name of the engine that was killed in the pass `during`.
    """

    killed: str
    before: list[Reply]
    again: list[Reply]
    during: list[Reply]
    after: list[Reply]


@dataclass
class Sum:
    """The rounds of one policy together.

    known: requests about images that were asked about before.
    warm: those of them that reached a backend that knows the image.
    reused: those of them whose images the engine did not compute again, as their usage says.
    """

    known: int = 0
    warm: int = 0
    reused: int = 0
    errors: int = 0
    routes: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)
    rates: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    repeats: list[float] = field(default_factory=list)
    requests: int = 0
    cpu_s: float = 0.0

    def add(self, one: Round) -> None:
        hits, known = warm(one.replies)
        good = [reply for reply in one.replies if not reply.error]
        later = [reply for reply in good if reply.ask.kind != "first"]
        self.requests += len(one.replies)
        self.cpu_s += one.cpu_s
        self.warm, self.known = self.warm + hits, self.known + known
        self.errors += len(one.replies) - len(good)
        self.reused += sum(reply.cached >= reply.visual for reply in later)
        self.routes.update(reply.route for reply in good)
        self.counted.update(one.counted)
        self.rates.append(len(good) / one.seconds)
        self.ttfts += [reply.ttft_s for reply in good]
        self.repeats += [reply.ttft_s for reply in later]

    def figures(self) -> dict[str, Any]:
        share = self.known or 1
        ttfts, repeats = sorted(self.ttfts), sorted(self.repeats)
        return {
            "requests": self.requests, "errors": self.errors, "known": self.known,
            "warm": self.warm / share, "reused": self.reused / share,
            "encoder_runs": self.counted["encoded"],
            "embed_evictions": self.counted["embed_evictions"],
            "cpu_ms": 1e3 * self.cpu_s / (self.requests or 1),
            "cached_share": self.counted["cached"] / (self.counted["prompt"] or 1),
            "ttft_p50_ms": 1e3 * percentile(ttfts, 50), "ttft_p95_ms": 1e3 * percentile(ttfts, 95),
            "repeat_p50_ms": 1e3 * percentile(repeats, 50), "requests_per_s": median(self.rates),
            "routes": dict(self.routes),
        }  # fmt: skip


def moved(earlier: Sequence[Reply], later: Sequence[Reply]) -> tuple[int, int]:
    """Count the images that another backend got in a later pass than in an earlier one, and all images."""
    was = {reply.ask.image: reply.backend for reply in earlier if not reply.error}
    both = [reply for reply in later if not reply.error and reply.ask.image in was]
    return sum(reply.backend != was[reply.ask.image] for reply in both), len(both)


def tables(rounds: Sequence[Round], added: Added, kill: Kill) -> tuple[str, dict[str, Any]]:
    """All tables, and the figures in them."""
    sums: dict[str, Sum] = {}
    for one in rounds:
        sums.setdefault(one.policy, Sum()).add(one)
    policies = {policy: one.figures() for policy, one in sums.items()}
    cost = _added_figures(added)
    killing = _kill_figures(kill)
    figures = {"policies": policies, "added": cost, "kill": killing}
    parts = [
        "## Policies: counts", _counts(policies), "## Policies: times", _times(policies),
        "## The gateway against direct", _cost(cost), "## One of four engines killed", _killing(killing),
        "## Targets", _targets(policies, killing),
    ]  # fmt: skip
    return "\n\n".join(parts), figures


def _counts(policies: dict[str, dict[str, Any]]) -> str:
    head = ("policy", "requests about known images", "at a warm backend", "image not computed again",
            "encoder runs", "cached prompt tokens", "failed")  # fmt: skip
    return numbers_table(
        head,
        [
            (
                name, str(one["known"]), f"{one['warm']:.1%}", f"{one['reused']:.1%}",
                f"{one['encoder_runs']:.0f}", f"{one['cached_share']:.1%}", str(one["errors"]),
            )
            for name, one in policies.items()
        ],
    )  # fmt: skip


def _times(policies: dict[str, dict[str, Any]]) -> str:
    head = ("policy", "engines' CPU ms/request", "TTFT p50 ms", "TTFT p95 ms", "TTFT p50 ms, known images",
            "requests/s")  # fmt: skip
    names = ("cpu_ms", "ttft_p50_ms", "ttft_p95_ms", "repeat_p50_ms")
    return numbers_table(
        head,
        [
            (policy, *(f"{one[name]:.0f}" for name in names), f"{one['requests_per_s']:.1f}")
            for policy, one in policies.items()
        ],
    )


def _added_figures(added: Added) -> dict[str, Any]:
    direct, through = sorted(added.direct), sorted(added.through)
    pairs = sorted(b - a for a, b in zip(added.direct, added.through, strict=True))
    return {
        "pairs": len(pairs), "body_kb": added.body / 1e3,
        "direct_p50_ms": 1e3 * percentile(direct, 50), "direct_p95_ms": 1e3 * percentile(direct, 95),
        "through_p50_ms": 1e3 * percentile(through, 50), "through_p95_ms": 1e3 * percentile(through, 95),
        "median_difference_ms": 1e3 * percentile(pairs, 50), "gateway_cpu_ms": 1e3 * added.cpu_s,
    }  # fmt: skip


def _cost(cost: dict[str, Any]) -> str:
    lines = [
        (title, f"{cost[f'{key}_p50_ms']:.1f}", f"{cost[f'{key}_p95_ms']:.1f}")
        for title, key in (("direct", "direct"), ("through the gateway", "through"))
    ]
    return (
        numbers_table((f"known image, body of {cost['body_kb']:.0f} kB", "TTFT p50 ms", "TTFT p95 ms"), lines)
        + f"\n\nMedian difference of {cost['pairs']} pairs: {cost['median_difference_ms']:.1f} ms. "
        f"Processor time of the gateway: {cost['gateway_cpu_ms']:.1f} ms for each request."
    )


def _kill_figures(kill: Kill) -> dict[str, Any]:
    passes = (kill.before, kill.again, kill.during, kill.after)
    calm, all_images = moved(kill.before, kill.again)
    gone, images = moved(kill.again, kill.after)
    others = [reply for reply in kill.again if reply.backend != kill.killed]
    strayed, rest = moved(others, kill.after)
    return {
        "images": images, "requests": sum(map(len, passes)),
        "failed": sum(bool(reply.error) for some in passes for reply in some),
        "errors": sorted({reply.error for some in passes for reply in some if reply.error})[:5],
        "retried": sum(reply.route.startswith("retry") for reply in kill.during),
        "moved_without_kill": calm / (all_images or 1), "moved": gone / (images or 1),
        "moved_from_others": strayed / (rest or 1),
    }  # fmt: skip


def _killing(kill: dict[str, Any]) -> str:
    lines = [
        ("images", str(kill["images"])),
        ("requests", str(kill["requests"])),
        ("failed", str(kill["failed"])),
        ("sent to a second backend", str(kill["retried"])),
        ("moved between two passes before the kill", f"{kill['moved_without_kill']:.1%}"),
        ("moved by the kill, of all images", f"{kill['moved']:.1%}"),
        ("moved by the kill, of the images of the other engines", f"{kill['moved_from_others']:.1%}"),
    ]
    return numbers_table(("one of four engines killed", ""), lines)


def _targets(policies: dict[str, dict[str, Any]], kill: dict[str, Any]) -> str:
    affine = policies["cache-affine"]
    least = policies["least-busy"]
    rows = [
        ("known images at a warm backend, cache-affine", f"{affine['warm']:.1%}",
         f"at least {WARM_TARGET:.0%}", affine["warm"] >= WARM_TARGET),
        ("images that move if one of four engines is killed", f"{kill['moved']:.1%}",
         f"at most {MOVED_TARGET:.0%}", kill["moved"] <= MOVED_TARGET),
        ("failed requests while an engine is killed", str(kill["failed"]), "0", not kill["failed"]),
        ("requests/s of cache-affine against least-busy",
         f"{affine['requests_per_s'] / least['requests_per_s']:.2f}x", "at least 1x",
         affine["requests_per_s"] >= least["requests_per_s"]),
        ("engines' processor time of cache-affine against least-busy",
         f"{affine['cpu_ms'] / least['cpu_ms']:.2f}x", "at most 1x", affine["cpu_ms"] <= least["cpu_ms"]),
    ]  # fmt: skip
    return numbers_table(
        ("target", "measured", "wanted", "met"),
        [(title, value, wanted, "yes" if met else "**no**") for title, value, wanted, met in rows],
    )


def page(text: str, options: argparse.Namespace) -> str:
    """The page with all tables."""
    return PAGE.format(
        tables=text, machine=machine(), file=options.page, **{
            name: value for name, value in vars(options).items() if name != "page"
        },
    )  # fmt: skip


PAGE = """# Routing with real engines

`python benchmarks/gateway/routing.py --rounds {rounds} --page {file}`, {machine}.

{engines} `fovea serve` with fovea-tiny, one thread each, with {kv_mib} MiB of KV and {embed_mib} MiB of
encoder outputs, which is room for about a third of the {images} images. {concurrency} requests are in flight.
In each of {rounds} rounds every policy plays the same requests with cold caches: each image is asked about
{times} times with the same question, in random order, and once more in a second turn.

- A backend is *warm* for an image if an earlier request about the image went there.
- *Image not computed again*: the usage of the answer counts at least the image's tokens as cached.
- Encoder runs, and the share of all prompt tokens that came from the cache, are counted by the engines
  (`/metrics`).
- CPU ms: processor time of all engines, with their decoding processes, for each request. Other programs
  hardly change it.
- Counts are exact. Times are of a machine with few cores, which all engines and other programs share: compare
  them within this page only.

{tables}
"""
