"""A plan as a chart: memory, stages of a request, throughput against clients, cost against rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fovea.bench.plot import figure, save
from fovea.cli.plan.result import Plan
from fovea.core.errors import ConfigError
from fovea.planner.option import Option, evaluate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    _memory(memory, best.option)
    _stages(stages, plan)
    _sweep(sweep, best.option)
    _cost(cost, plan, best.option)
    save(chart, path)


def _memory(axes: Axes, option: Option) -> None:
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


def _stages(axes: Axes, plan: Plan) -> None:
    names = [one.kind.name for one in plan.asked]
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


def _sweep(axes: Axes, option: Option) -> None:
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


def _cost(axes: Axes, plan: Plan, option: Option) -> None:
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
