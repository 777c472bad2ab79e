"""A plan as tables for a terminal, and as a chart.

The chart shows memory, stages of a request, throughput against clients, and cost against rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fovea.bench.plot import figure, save
from fovea.cli.advise import show_advice
from fovea.cli.plan.result import Plan
from fovea.core.errors import ConfigError
from fovea.planner.option import Option, evaluate
from fovea.planner.parallel import split_sentence
from fovea.planner.recommend import Choice
from fovea.planner.stages import request_stages

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def show_extras(plan: Plan, console: Console) -> None:
    """Print what caches save, what drafts would gain, how to divide the model, and which engine suits."""
    for saving in plan.savings:
        console.print(
            f"{saving.name}: saves {1e3 * saving.seconds:,.1f} ms of encoder and prompt per request "
            f"({saving.share:.0%})"
        )
    if plan.speculation:
        shown = ", ".join(f"{drafts}: {speedup:.2f}x" for drafts, (_, speedup) in plan.speculation.items())
        console.print(f"drafts, 60% of them right, by number per step: {shown}")
    _divisions(plan, console)
    if plan.advice is not None:
        show_advice(plan.advice, console)


def _divisions(plan: Plan, console: Console) -> None:
    if plan.divisions:
        table = Table(
            "tensor x pipeline",
            "GB per device",
            "copies of KV",
            "sums per step",
            "bubble",
            box=SIMPLE_HEAD,
            pad_edge=False,
        )
        for one in plan.divisions:
            table.add_row(
                f"{one.tensor} x {one.pipeline}", f"{one.weight_bytes / 1e9:.1f}", str(one.kv_copies),
                str(one.exchanges), f"{one.bubble:.0%}",
            )  # fmt: skip
        console.print(table)
    if plan.recommendation.best is not None or (plan.split is not None and plan.split.recommended):
        console.print(split_sentence(plan.split, plan.workload))


GB = 1e9
MOST_OTHERS = 6
"""Runners-up that are shown; `--json` has all of them."""
BAR = 30
"""Characters of the bar that shows the memory."""


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    best = plan.recommendation.best
    console.print(f"[bold]{plan.model.shape.name}[/bold]: {_about(plan)}")
    _tokens(plan, console)
    if best is None:
        console.print("[bold red]No configuration meets the targets.[/bold red]")
        _impossible(plan, console)
        show_extras(plan, console)
        return
    console.print(f"\n[bold green]Recommended: {best.title}[/bold green]")
    for reason in best.reasons:
        console.print(f"- {reason}")
    _memory(best.option, console)
    _stages(plan, best.option, console)
    _work(best.option, console)
    _speed(plan, best.option, console)
    for sentence in plan.fleet.sentences(plan.workload) if plan.fleet else ():
        console.print(sentence)
    _sweep(best.option, console)
    _others(plan, console)
    show_extras(plan, console)
    for note in plan.notes:
        console.print(f"note: {note}")


def _about(plan: Plan) -> str:
    shape = plan.model.shape
    active = (
        f", {(shape.active_weights + shape.weights('head')) / 1e9:.1f} B per token" if shape.experts else ""
    )
    text = (
        f"{shape.parameters / 1e9:.2f} B parameters{active}, "
        f"{shape.kv_bytes_per_token(2) / 1024:.0f} KiB of bfloat16 KV per token"
    )
    state = shape.state_bytes(2)
    return text + (f", {state / 2**20:.1f} MiB of states per sequence" if state else "")


def _tokens(plan: Plan, console: Console) -> None:
    table = _table(
        "kind of request",
        "share",
        "images",
        "visual tokens",
        "prompt",
        "answer",
        "MB of KV: visual + text",
    )
    for one in plan.kinds:
        sizes = ", ".join(f"{width}x{height}" for width, height in one.kind.images) or "-"
        if one.kind.video is not None:
            video = one.kind.video
            sizes = f"{video.frames} frames {video.width}x{video.height}"
        visual, text = plan.kv_megabytes(one)
        table.add_row(
            one.kind.name, f"{one.share:.0%}", sizes, f"{one.tokens.visual:,}", f"{one.tokens.prompt:,.0f}",
            f"{one.tokens.answer:,.0f}", f"{visual:,.1f} + {text:,.1f}",
        )  # fmt: skip
    console.print(table)


def _memory(option: Option, console: Console) -> None:
    memory = option.capacity
    parts = {
        "weights": memory.weight_bytes, "activations": memory.work, "encoder cache": memory.encoder_cache,
        "KV and states": memory.kv,
    }  # fmt: skip
    table = _table("memory of a replica", "GB", "share", "")
    for name, size in parts.items():
        share = size / memory.total
        table.add_row(name, f"{size / GB:.2f}", f"{share:.0%}", "█" * round(BAR * share))
    table.add_row("all", f"{memory.total / GB:.2f}", "", f"{memory.requests:,} requests fit at once")
    console.print(table)


def _stages(plan: Plan, option: Option, console: Console) -> None:
    table = _table(
        "one request alone, ms", "prepare", "encode", "prefill", "first token", "per token", "whole"
    )
    for one, figures in zip(option.kinds, plan.stages, strict=True):
        table.add_row(one.kind.name, *(f"{1e3 * seconds:,.1f}" for seconds in figures))
    console.print(table)


def _work(option: Option, console: Console) -> None:
    table = _table("work of one request", "stage", "10^9 operations", "GB", "ms", "bound by")
    for one in option.kinds:
        for number, stage in enumerate(request_stages(option, one)):
            if stage.seconds:
                table.add_row(
                    one.kind.name if not number else "", stage.name, f"{stage.operations / 1e9:,.1f}",
                    f"{stage.bytes / GB:,.2f}", f"{1e3 * stage.seconds:,.1f}", stage.bound,
                )  # fmt: skip
    console.print(table)


def _speed(plan: Plan, option: Option, console: Console) -> None:
    speed, workload = option.speed, plan.workload
    if speed is None:
        return
    rate = workload.requests_per_s / option.replicas
    table = _table(f"one replica at {rate:.2f} requests/s", "formulas", "simulated")
    simulated = plan.simulated
    target = f"{workload.percentile:g}%"

    def row(name: str, field: str) -> None:
        played = "-" if simulated is None else f"{1e3 * getattr(simulated, field):,.1f}"
        table.add_row(name, f"{1e3 * getattr(speed, field):,.1f}", played)

    row("first token, mean, ms", "ttft_s")
    row(f"first token, {target}, ms", "ttft_p_s")
    row("between tokens, mean, ms", "itl_s")
    row(f"between tokens, {target}, ms", "itl_p_s")
    tokens = "-" if simulated is None else f"{simulated.tokens_per_s:,.0f}"
    table.add_row("tokens/s", f"{speed.tokens_per_s:,.0f}", tokens)
    table.add_row("busy", f"{speed.busy:.0%}", "-")
    console.print(table)
    money = [
        ("per hour", option.price_per_hour, "$"), ("per request", option.price_per_request(workload), "$"),
        ("per 1,000 images", option.price_per_thousand_images(workload), "$"),
    ]  # fmt: skip
    shown = [f"{sign}{value:,.5f} {name}" for name, value, sign in money if value is not None]
    joules = option.joules_per_request(workload)
    if joules is not None:
        shown.append(f"{joules:,.0f} J per request")
    console.print("cost: " + (", ".join(shown) or "no price is known for this device"))


def _sweep(option: Option, console: Console) -> None:
    table = _table("clients that wait for answers", "tokens/s", "answers/s", "first token, ms", "gap, ms")
    for clients, speed in option.sweep:
        table.add_row(
            str(clients), f"{speed.tokens_per_s:,.0f}", f"{speed.requests_per_s:.2f}",
            f"{1e3 * speed.ttft_s:,.0f}", f"{1e3 * speed.itl_s:,.1f}",
        )  # fmt: skip
    console.print(table)


def _others(plan: Plan, console: Console) -> None:
    others = plan.recommendation.others
    if others:
        table = _table("runners-up", "$/hour", "first token, ms", "gap, ms", "why not")
        for choice in others[:MOST_OTHERS]:
            table.add_row(choice.title, *_figures(choice), "; ".join(choice.reasons))
        console.print(table)
    _impossible(plan, console)
    for sentence in plan.recommendation.refused:
        console.print(f"not possible with Fovea: {sentence}")


def _impossible(plan: Plan, console: Console) -> None:
    if plan.recommendation.impossible:
        table = _table("impossible", "because")
        for title, problem in plan.recommendation.impossible:
            table.add_row(title, problem)
        console.print(table)


def _figures(choice: Choice) -> Iterable[str]:
    price, speed = choice.option.price_per_hour, choice.option.speed
    yield "-" if price is None else f"{price:,.2f}"
    yield "-" if speed is None else f"{1e3 * speed.ttft_p_s:,.0f}"
    yield "-" if speed is None else f"{1e3 * speed.itl_s:,.1f}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        left = name in ("", "why not", "because", "images")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    return table


RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Rates of the cost curve, as multiples of the workload's."""


def draw(path: Path, plan: Plan) -> None:
    """Draw the recommended configuration. Raises ConfigError if there is none, or for a wrong path."""
    best = plan.recommendation.best
    if best is None:
        raise ConfigError("there is no configuration to draw: none meets the targets", param="plot")
    chart = figure(13.0, 9.0)
    chart.suptitle(f"{plan.model.shape.name}: {best.title}")
    ((memory, stages), (sweep, cost)) = chart.subplots(2, 2)
    _draw_memory(memory, best.option)
    _draw_stages(stages, plan)
    _draw_sweep(sweep, best.option)
    _draw_cost(cost, plan, best.option)
    save(chart, path)


def _draw_memory(axes: Axes, option: Option) -> None:
    memory, below = option.capacity, 0.0
    parts = {
        **memory.weights,
        "activations": memory.work,
        "encoder cache": memory.encoder_cache,
        "KV and states": memory.kv,
    }
    for name, size in parts.items():
        if size:
            axes.bar(["one replica"], [size / 1e9], bottom=below, label=name)
            below += size / 1e9
    axes.axhline(memory.total / 1e9, color="black", linewidth=0.8)
    axes.set_ylabel("GB")
    axes.set_title(f"memory: {memory.requests:,} requests fit at once")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _draw_stages(axes: Axes, plan: Plan) -> None:
    names = [one.kind.name for one in plan.kinds]
    left = [0.0] * len(names)
    for place, stage in enumerate(("prepare", "encode", "prefill")):
        seconds = [1e3 * figures[place] for figures in plan.stages]
        axes.barh(names, seconds, left=left, label=stage)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    decode = [1e3 * (figures[5] - figures[3]) for figures in plan.stages]
    axes.barh(names, decode, left=left, label="decode")
    axes.set_xlabel("ms, one request alone")
    axes.set_title("stages")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _draw_sweep(axes: Axes, option: Option) -> None:
    clients = [count for count, _ in option.sweep]
    axes.plot(clients, [speed.tokens_per_s for _, speed in option.sweep], marker="o", label="tokens/s")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("clients of one replica")
    axes.set_ylabel("tokens/s")
    gaps = axes.twinx()
    gaps.plot(
        clients,
        [1e3 * speed.itl_s for _, speed in option.sweep],
        color="tab:orange",
        marker="s",
        label="ms between tokens",
    )
    gaps.set_ylabel("ms between tokens")
    axes.legend(handles=[*axes.lines, *gaps.lines], fontsize="small", loc="upper left")
    axes.set_title("throughput and gap against clients")
    axes.grid(alpha=0.3)


def _draw_cost(axes: Axes, plan: Plan, option: Option) -> None:
    rates, prices = [], []
    for factor in RATES:
        workload = replace(plan.workload, rate=plan.workload.rate * factor)
        price = evaluate(option.setup, workload, plan.model.count).price_per_request(workload)
        if price is not None:
            rates.append(workload.requests_per_s)
            prices.append(1000 * price)
    if rates:
        axes.plot(rates, prices, marker="o")
        axes.set_xscale("log", base=2)
        axes.set_ylabel("$ per 1,000 requests")
    else:
        axes.text(0.5, 0.5, "no price is known for this device", ha="center", transform=axes.transAxes)
    axes.set_xlabel("requests/s")
    axes.set_title("cost against rate")
    axes.grid(alpha=0.3)
