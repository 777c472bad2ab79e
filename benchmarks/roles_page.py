"""Print the results of benchmarks/roles.py as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fovea.core.markdown import markdown_table

Body = Mapping[str, Any]
"""Results by section, as in roles.json. A section may be missing."""
SECTIONS = ("tiny", "fault", "small")
INTEGRATED, ENCODE_APART = "integrated", "encode apart"
SETUPS = (INTEGRATED, ENCODE_APART, "prefill apart")


@dataclass(frozen=True, slots=True)
class Cell:
    """Images of one size.

    side: of the images, in pixels.
    seconds: in which they arrive.
    probes: images that measure the highest rate.
    loads: rates of arrivals, as shares of it.
    """

    side: int
    seconds: float
    probes: int
    loads: tuple[float, ...]
    setups: tuple[str, ...] = SETUPS


CELLS: Mapping[str, Sequence[Cell]] = {
    "tiny": (Cell(448, 4.0, 16, (0.5, 0.9)), Cell(1344, 4.0, 3, (0.5, 0.9))),
    "small": (Cell(448, 5.0, 3, (0.5, 0.9)), Cell(1344, 5.0, 1, (0.5,), (INTEGRATED, ENCODE_APART))),
}
"""By section. An image of 1344x1344 takes the 0.5 B model half a minute, so there is one in each run."""
FIGURES = {
    "gap_p50_ms": "gap p50, ms",
    "gap_p99_ms": "gap p99, ms",
    "gap_longest_ms": "longest gap, ms",
    "ttft_p50_ms": "image: first token p50, ms",
    "ttft_p99_ms": "p99, ms",
    "text_tokens_per_s": "text tokens/s",
    "images_per_s": "images/s",
}
RATIOS = ("gap_p99_ms", "gap_longest_ms", "ttft_p50_ms", "ttft_p99_ms", "text_tokens_per_s", "images_per_s")
MOST_GAP = 2.0
"""Longest gap of others after the death of an encode peer, as a multiple of the usual longest one."""
NOT_HERE = "Not measured here."


def page(body: Body) -> str:
    """The Markdown text of all results."""
    return "\n\n".join(
        (
            "# Roles, measured",
            "`make bench-roles` compares one server that does everything with two threads on two cores with "
            "two servers that have a core and a thread each ([docs/roles.md](../../docs/roles.md)): *encode "
            "apart* (roles `encode` and `prefill-decode`) and *prefill apart* (`prefill` and `decode`). Two "
            "clients read text answers all the time; their gaps are counted. Requests with a new image "
            "arrive at the given share of the highest rate of the integrated server without text. All "
            "setups take turns with the same arrivals. Figures are medians over the rounds, with the "
            "smallest and the largest.",
            *(part for name in ("tiny", "small") for part in _section(name, body.get(name))),
            "## An encode server that dies",
            _fault(body.get("fault")),
        )
    )


def _section(name: str, section: Body | None) -> tuple[str, ...]:
    title = "## fovea-tiny" if name == "tiny" else "## Random weights, 0.5 B parameters"
    if section is None:
        return title, NOT_HERE
    rounds = len(section["cells"][0]["rounds"])
    figures, ratios, transfers = [], [], []
    for cell in section["cells"]:
        about = f"{cell['side']}x{cell['side']}, {cell['load']:.0%}"
        for setup in cell["rounds"][0]:
            values = [one[setup] for one in cell["rounds"]]
            figures.append([about, setup, *(_spread([one[key] for one in values]) for key in FIGURES)])
            if setup == INTEGRATED:
                continue
            through = [(one[setup], one[INTEGRATED]) for one in cell["rounds"]]
            ratios.append(
                [about, setup, *(_spread([a[key] / b[key] for a, b in through], "x") for key in RATIOS)]
            )
            transfers.append(
                [
                    about,
                    setup,
                    f"{sum(one['by_peers'] for one in values):.0f} of "
                    f"{sum(one['images'] for one in values):.0f}",
                    _spread([one["transfer_kb_per_image"] for one in values]),
                    _spread([one["transfer_ms_per_image"] for one in values]),
                ]
            )
    return (
        title,
        f"{section['machine']}; {section['minutes']:.1f} minutes, {rounds} rounds.",
        markdown_table(["images, load", "setup", *FIGURES.values()], figures),
        "Each divided by the integrated server's figure of the same round:",
        markdown_table(["images, load", "setup", *(FIGURES[key] for key in RATIOS)], ratios),
        "What was handed over:",
        markdown_table(
            ["images, load", "setup", "requests that a peer worked for", "kB per image", "ms per image"],
            transfers,
        ),
    )


def _fault(section: Body | None) -> str:
    if section is None:
        return NOT_HERE
    usual, killed, alone = section["usual"], section["killed"], section["without"]
    ratio = killed["gap_longest_ms"] / usual["gap_longest_ms"]
    other = killed["gap_longest_ms"] / alone["gap_longest_ms"]
    names = {
        "the encode server works": usual,
        "it is killed while it encodes": killed,
        "it is still dead": alone,
    }
    rows = [
        [name, f"{one['ttft_ms']:.0f}", f"{one['gap_p99_ms']:.1f}", f"{one['gap_longest_ms']:.1f}"]
        for name, one in names.items()
    ]
    judged = "kept" if ratio <= MOST_GAP else "**missed**"
    return "\n\n".join(
        (
            f"{section['machine']}. {section['model']}, one {section['side']}x{section['side']} image beside "
            "two text answers; the engine that answers encodes the image itself after the death.",
            markdown_table(["", "first token of the image, ms", "gap p99, ms", "longest gap, ms"], rows),
            f"The longest gap is {ratio:.2f} times the usual one (target: at most {MOST_GAP:g}; {judged}), "
            f"and {other:.2f} times that of an engine without the peer.",
        )
    )


def _spread(values: Sequence[float], unit: str = "") -> str:
    """The median, with the smallest and the largest of several values."""
    middle = statistics.median(values)
    digits = 2 if unit or middle < 10 else 0
    text = f"{middle:,.{digits}f}{unit}"
    if len(values) == 1:
        return text
    return f"{text} ({min(values):,.{digits}f}{unit} - {max(values):,.{digits}f}{unit})"
