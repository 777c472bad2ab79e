"""A profile as tables, as JSON and as stacked bars: the time of a request by stage, and its lower bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fovea.bench.plot import figure, save
from fovea.cli.profile.measure import Part, Profile, Stage
from fovea.observe.profile import STAGES, WAITING

HEAD = ("", "calls", "busy ms", "path ms", "share", "bound ms", "bound by", "x bound")
MIB = 1 << 20


def table(profile: Profile) -> str:
    """Return tables in milliseconds: one request, and the steady load per request."""
    machine, info, requests = profile.machine, profile.info, profile.requests
    peaks = ", ".join(
        f"{count / 1e9:.0f} G op/s {name or info.dtype}" for name, count in machine.peaks.items()
    )
    picture = "no image" if profile.image is None else f"an image of {profile.image[0]}x{profile.image[1]}"
    lines = [
        f"{info.name}: {info.parameters / 1e6:.1f} M parameters, {info.dtype}, "
        f"quantization {info.quantization}, {info.device}, "
        f"{profile.weight_bytes / MIB:.1f} MiB of weights in memory",
        f"machine: {machine.kernels}, {machine.threads} threads: {machine.bandwidth / 1e9:.1f} GB/s "
        f"(over {machine.stream_bytes / MIB:.0f} MiB), {peaks}",
        f"request: {picture}, prompt {profile.prompt_tokens} tokens ({profile.visual_tokens} visual), "
        f"answer {requests.tokens}",
    ]
    for part in profile.parts:
        lines += ["", *_part(part)]
    return "\n".join(lines)


PLANNED = {"encoder": "encode", "prefill": "prefill", "decode step": "decode"}
"""Stages of the planner that have efficiencies, by stage of a profile."""


def hardware_toml(profile: Profile) -> str:
    """Return the machine as a file of `fovea plan`, with the efficiencies of the request that was alone."""
    import torch

    from fovea.cli.plan.inputs import profiled, to_toml

    ratios = {
        PLANNED[stage.time.stage]: stage.ratio
        for stage in profile.parts[0].stages
        if stage.time.stage in PLANNED and stage.ratio
    }
    device = torch.device(profile.info.device)
    return to_toml(profiled(profile.machine, profile.info.dtype, device, ratios))


def as_dict(profile: Profile) -> dict[str, Any]:
    """Return the profile for JSON, in seconds and per second. The load's requests are added up."""
    machine = asdict(profile.machine)
    machine["peaks"] = {name or profile.info.dtype: value for name, value in profile.machine.peaks.items()}
    return {
        "fovea_profile": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {
            "name": profile.info.name, "parameters": profile.info.parameters, "dtype": profile.info.dtype,
            "quantization": profile.info.quantization, "device": profile.info.device,
            "weight_bytes": profile.weight_bytes,
        },
        "machine": machine,
        "asked": {
            **asdict(profile.requests),
            "image": None if profile.requests.image is None else str(profile.requests.image),
            "pixels": profile.image, "prompt_tokens": profile.prompt_tokens,
            "visual_tokens": profile.visual_tokens,
        },
        "parts": [_part_dict(part) for part in profile.parts],
    }  # fmt: skip


def _part(part: Part) -> Iterator[str]:
    per = 1e3 / part.requests
    several = part.requests > 1
    first = "no text" if part.ttft_s is None else f"first text after {part.ttft_s * 1e3:.1f} ms"
    yield (
        f"{part.title}: "
        + (f"{part.requests} requests in " if several else "")
        + f"{part.wall_s * 1e3:.1f} ms, {first}{' in the median' * several}, "
        f"{part.tokens / part.wall_s:.1f} tokens/s; {part.attributed:.1%} of the time is in a stage"
        + (f"; {part.wall_s / part.bound_s:.2f} times the sum of the lower bounds" if part.bound_s else "")
    )
    if several:
        yield f"  {part.concurrency} at once; the table: sum of all requests, divided by their number"
    rows = [HEAD, *(_row(stage, part) for stage in part.stages)]
    total = sum(stage.time.path_s for stage in part.stages)
    rows.append(("all", "", "", f"{total * per:.2f}", "", f"{part.bound_s * per:.2f}", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for first, *cells in rows:
        others = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        yield "  ".join(["", first.ljust(widths[0]), *others]).rstrip()


def _row(stage: Stage, part: Part) -> tuple[str, ...]:
    per = 1e3 / part.requests
    time, bound, ratio = stage.time, stage.bound, stage.ratio
    return (
        time.stage,
        str(time.calls) if time.calls else "",
        f"{time.busy_s * per:.2f}",
        f"{time.path_s * per:.2f}",
        f"{time.path_s / part.wall_s:.1%}",
        f"{bound.seconds * per:.3f}" if bound else "-",
        bound.limit if bound else "",
        f"{ratio:.2f}" if ratio else "",
    )


def _part_dict(part: Part) -> dict[str, Any]:
    return {
        "title": part.title, "requests": part.requests, "concurrency": part.concurrency,
        "wall_s": part.wall_s,
        "ttft_s": part.ttft_s, "tokens": part.tokens, "attributed": part.attributed,
        "floor_s": part.bound_s,
        "stages": [
            {
                **asdict(stage.time),
                "floor_s": stage.bound.seconds if stage.bound else None,
                "memory_s": stage.bound.memory_s if stage.bound else None,
                "arithmetic_s": stage.bound.arithmetic_s if stage.bound else None,
                "ratio": stage.ratio,
            }
            for stage in part.stages
        ],
    }  # fmt: skip


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
