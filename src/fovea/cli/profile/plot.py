"""A profile as stacked bars: the time of a request by stage, and below it the lower bounds."""

from __future__ import annotations

from pathlib import Path

from fovea.bench.plot import figure, save
from fovea.cli.profile.measure import Part, Profile
from fovea.observe.profile import STAGES, WAITING

LEAST_LABEL = 0.04
"""Least share of the longest bar at which a section is labelled."""


def draw(path: Path, profile: Profile) -> None:
    """Draw the chart. Raises ConfigError when the file cannot be written."""
    from matplotlib import colormaps

    chart = figure(10, 1.8 + 1.1 * len(profile.parts))
    axes = chart.subplots()
    colors = {name: colormaps["tab20"](place) for place, name in enumerate(STAGES)} | {WAITING: "white"}
    bars = [bar for part in profile.parts for bar in _bars(part)]
    longest = max(sum(sections.values()) for _, sections in bars)
    for place, (_, sections) in enumerate(bars):
        left = 0.0
        for name in (*STAGES, WAITING):
            width = sections.get(name, 0.0)
            axes.barh(place, width, left=left, color=colors[name], edgecolor="grey", linewidth=0.3)
            if width > LEAST_LABEL * longest:
                axes.text(left + width / 2, place, f"{width:.1f}", ha="center", va="center", fontsize="small")
            left += width
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.set_xlim(0, 1.03 * longest)
    axes.invert_yaxis()
    axes.set_xlabel("ms per request")
    names = [name for name in (*STAGES, WAITING) if any(name in sections for _, sections in bars)]
    from matplotlib.patches import Patch

    chart.legend(
        handles=[Patch(facecolor=colors[name], edgecolor="grey", label=name) for name in names],
        loc="outside lower center",
        ncols=6,
    )
    info, machine = profile.info, profile.machine
    chart.suptitle(
        f"{info.name}, {info.dtype}, quantization {info.quantization}, {machine.kernels}, "
        f"{machine.threads} threads: "
        f"prompt {profile.prompt_tokens} tokens, answer {profile.requests.tokens}",
        fontsize="medium",
    )
    save(chart, path)


def _bars(part: Part) -> list[tuple[str, dict[str, float]]]:
    per = 1e3 / part.requests
    measured = {stage.time.stage: stage.time.path_s * per for stage in part.stages}
    bounds = {stage.time.stage: stage.bound.seconds * per for stage in part.stages if stage.bound}
    return [(part.title, measured), ("lower bound", bounds)]
