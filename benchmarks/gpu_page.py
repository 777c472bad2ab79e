"""Floors, targets and the Markdown page of `benchmarks/gpu.py`.

It does not import torch, so tests run anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

NOT_MEASURED = "not yet measured"


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder.

    layers, heads, kv_heads, head_dim: as usual.
    linear: parameters of all linear layers without the language head.
    head: parameters of the language head.
    bytes: bytes per number.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    linear: int
    head: int
    bytes: int = 2


@dataclass(frozen=True)
class Target:
    """A ratio that must be reached.

    title: text on the page.
    key: name of the ratio in `figures`.
    least: smallest ratio that meets the target.
    """

    title: str
    key: str
    least: float


TARGETS = (
    Target("decode, one request: share of the rate that memory bandwidth allows", "decode_of_floor", 0.7),
    Target("prefill of 8 x 1,024 visual tokens: share of the matrix rate", "prefill_of_peak", 0.55),
    Target(
        "32 requests: tokens/s against transformers, one request after the other",
        "against_transformers",
        10.0,
    ),
)


def decode_seconds(shape: Shape, context: int, bandwidth: float) -> float:
    """The least time in seconds for one token of one request.

    It reads every weight and the KV of its context once.
    bandwidth: bytes per second.
    """
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * context
    return shape.bytes * (shape.linear + shape.head + kv) / bandwidth


def prefill_operations(shape: Shape, lengths: list[int]) -> float:
    """Floating-point operations to prefill prompts of these lengths.

    They are the products of all rows, causal attention, and the head for the last row of each prompt.
    """
    attention = sum(4 * shape.layers * shape.heads * shape.head_dim * n * (n + 1) / 2 for n in lengths)
    return 2.0 * shape.linear * sum(lengths) + attention + 2.0 * shape.head * len(lengths)


def figures(shape: Shape, measured: dict[str, float]) -> dict[str, float]:
    """The ratios that targets refer to.

    measured: bandwidth (bytes/s), peak (operations/s), decode_tok_s at about `context` tokens, prefill_s of
        `prompts` prompts of `prompt_tokens` tokens, tok_s_32; if transformers was measured, also
        transformers_tok_s and transformers_32_tok_s.
    """
    floor = decode_seconds(shape, int(measured["context"]), measured["bandwidth"])
    lengths = [int(measured["prompt_tokens"])] * int(measured["prompts"])
    ratios = {
        "decode_of_floor": measured["decode_tok_s"] * floor,
        "prefill_of_peak": prefill_operations(shape, lengths) / measured["prefill_s"] / measured["peak"],
    }
    if "transformers_tok_s" in measured:
        ratios["against_transformers"] = measured["tok_s_32"] / measured["transformers_tok_s"]
    if "transformers_32_tok_s" in measured:
        ratios["against_batch"] = measured["tok_s_32"] / measured["transformers_32_tok_s"]
    return ratios


def table(measured: dict[str, float], ratios: dict[str, float]) -> list[str]:
    """The Markdown tables: targets first, then all measured figures."""
    lines = ["| target | set | reached | |", "|---|---|---|---|"]
    for target in TARGETS:
        value = ratios.get(target.key)
        reached = NOT_MEASURED if value is None else f"{value:.2f}"
        verdict = "" if value is None else "met" if value >= target.least else "MISSED"
        lines.append(f"| {target.title} | {target.least:g} | {reached} | {verdict} |")
    if "against_batch" in ratios:
        lines += ["", f"Against transformers with all 32 in one batch: {ratios['against_batch']:.2f}x."]
    lines += ["", "| measured | |", "|---|---|"]
    return lines + [f"| {name} | {value:,.6g} |" for name, value in measured.items()]


def page(
    title: str, about: str, tests: str, measured: dict[str, float], shape: Shape | None, note: str
) -> str:
    """The whole page. shape: None if nothing was measured; then `note` gives the reason."""
    ratios = {} if shape is None else figures(shape, measured)
    lines = [f"# {title}", "", about, "", f"Tests: {tests}", "", *table(measured, ratios)]
    return "\n".join([*lines, *(["", note] if note else [])]) + "\n"
