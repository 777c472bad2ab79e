"""A profile as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from fovea.cli.profile.measure import Part, Profile, Stage

HEAD = ("", "calls", "busy ms", "path ms", "share", "floor ms", "bound by", "x floor")
MIB = 1 << 20


def table(found: Profile) -> str:
    """Milliseconds of one request, and of the steady load per request."""
    machine, info, requests = found.machine, found.info, found.requests
    peaks = ", ".join(
        f"{count / 1e9:.0f} G op/s {name or info.dtype}" for name, count in machine.peaks.items()
    )
    seen = "no image" if found.image is None else f"an image of {found.image[0]}x{found.image[1]}"
    lines = [
        f"{info.name}: {info.parameters / 1e6:.1f} M parameters, {info.dtype}, quantization {info.quantization}, "
        f"{info.device}, {found.weight_bytes / MIB:.1f} MiB of weights as kept",
        f"machine: {machine.kernels}, {machine.threads} threads: {machine.bandwidth / 1e9:.1f} GB/s "
        f"(over {machine.stream_bytes / MIB:.0f} MiB), {peaks}",
        f"asked: {seen}, prompt {found.prompt_tokens} tokens ({found.visual_tokens} visual), answer {requests.tokens}",
    ]
    for part in found.parts:
        lines += ["", *_part(part)]
    return "\n".join(lines)


def as_dict(found: Profile) -> dict[str, Any]:
    """Seconds; rates per second. Of the load, all its requests together."""
    machine = asdict(found.machine)
    machine["peaks"] = {name or found.info.dtype: value for name, value in found.machine.peaks.items()}
    return {
        "fovea_profile": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {
            "name": found.info.name, "parameters": found.info.parameters, "dtype": found.info.dtype,
            "quantization": found.info.quantization, "device": found.info.device, "weight_bytes": found.weight_bytes,
        },
        "machine": machine,
        "asked": {
            **asdict(found.requests), "image": None if found.requests.image is None else str(found.requests.image),
            "pixels": found.image, "prompt_tokens": found.prompt_tokens, "visual_tokens": found.visual_tokens,
        },
        "parts": [_part_dict(part) for part in found.parts],
    }  # fmt: skip


def _part(part: Part) -> Iterator[str]:
    per = 1e3 / part.requests
    how = f", {part.requests} requests, {part.concurrency} at once; per request" if part.requests > 1 else ""
    first = "no text" if part.ttft_s is None else f"first text after {part.ttft_s * 1e3:.1f} ms"
    yield (
        f"{part.title}{how}: {part.wall_s * per:.1f} ms, {first}, "
        f"{part.tokens / part.wall_s:.1f} tokens/s; {part.attributed:.1%} of the time is in a stage"
    )
    rows = [HEAD, *(_row(stage, part) for stage in part.stages)]
    total = sum(stage.time.path_s for stage in part.stages)
    over = f"{part.wall_s / part.floor_s:.2f}" if part.floor_s else ""
    rows.append(("all", "", "", f"{total * per:.2f}", "", f"{part.floor_s * per:.2f}", "", over))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for first, *cells in rows:
        others = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        yield "  ".join(["", first.ljust(widths[0]), *others]).rstrip()


def _row(stage: Stage, part: Part) -> tuple[str, ...]:
    per = 1e3 / part.requests
    time, floor, ratio = stage.time, stage.floor, stage.ratio
    return (
        time.stage,
        str(time.calls) if time.calls else "",
        f"{time.busy_s * per:.2f}",
        f"{time.path_s * per:.2f}",
        f"{time.path_s / part.wall_s:.1%}",
        f"{floor.seconds * per:.3f}" if floor else "-",
        floor.bound if floor else "",
        f"{ratio:.2f}" if ratio else "",
    )


def _part_dict(part: Part) -> dict[str, Any]:
    return {
        "title": part.title, "requests": part.requests, "concurrency": part.concurrency, "wall_s": part.wall_s,
        "ttft_s": part.ttft_s, "tokens": part.tokens, "attributed": part.attributed, "floor_s": part.floor_s,
        "stages": [
            {
                **asdict(stage.time),
                "floor_s": stage.floor.seconds if stage.floor else None,
                "memory_s": stage.floor.memory_s if stage.floor else None,
                "arithmetic_s": stage.floor.arithmetic_s if stage.floor else None,
                "ratio": stage.ratio,
            }
            for stage in part.stages
        ],
    }  # fmt: skip
