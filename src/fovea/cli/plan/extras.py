"""The tables of a plan below the recommendation: savings, drafts, divisions, engines."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fovea.cli.plan.advice import show_advice
from fovea.cli.plan.result import Plan


def show_extras(plan: Plan, console: Console) -> None:
    """Print what caches save, what drafts would gain, how to divide the model, and which engine suits."""
    for saving in plan.savings:
        console.print(
            f"{saving.name}: saves {1e3 * saving.seconds:,.1f} ms of encoder and prompt per request "
            f"({saving.share:.0%})"
        )
    if plan.speculation:
        shown = ", ".join(f"{drafts}: {speedup:.2f}x" for drafts, (_, speedup) in plan.speculation.items())
        console.print(f"drafts of which 60% are right, by number per step: {shown}")
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
    split = plan.split
    if split is not None:
        console.print(
            f"encoders apart: {split.encoders} of {split.encoders + split.decoders} replicas encode, "
            f"{split.requests_per_s:.2f} requests/s instead of {split.integrated_per_s:.2f}, a token every "
            f"{1e3 * split.itl_s:.1f} instead of {1e3 * split.integrated_itl_s:.1f} ms"
        )
