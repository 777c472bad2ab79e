"""What `benchmarks/gpu.py` makes of its measurements: floors, targets, a page. No torch, so it is tested anywhere."""

from __future__ import annotations

from dataclasses import dataclass

NOT_MEASURED = "not yet measured"


@dataclass(frozen=True)
class Shape:
    """Of a decoder. linear: parameters of its linear maps, head apart; head: those of the head. bytes: of a number."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    linear: int
    head: int
    bytes: int = 2


@dataclass(frozen=True)
class Target:
    """key: of `figures`. least: the ratio that was set as target."""

    title: str
    key: str
    least: float


TARGETS = (
    Target("decode, one request: of what memory allows", "decode_of_floor", 0.7),
    Target("prefill of 8 x 1,024 visual tokens: of the matrix rate", "prefill_of_peak", 0.55),
    Target(
        "32 requests: tokens/s against transformers, one request after the other",
        "against_transformers",
        10.0,
    ),
)


def decode_seconds(shape: Shape, context: int, bandwidth: float) -> float:
    """The least that a token of one request takes: every weight and the KV of its context, once, at `bandwidth` bytes/s."""
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * context
    return shape.bytes * (shape.linear + shape.head + kv) / bandwidth


def prefill_operations(shape: Shape, lengths: list[int]) -> float:
    """Of prompts of these lengths: products of all rows, causal attention, and the head for the last row of each."""
    attention = sum(4 * shape.layers * shape.heads * shape.head_dim * n * (n + 1) / 2 for n in lengths)
    return 2.0 * shape.linear * sum(lengths) + attention + 2.0 * shape.head * len(lengths)


def figures(shape: Shape, measured: dict[str, float]) -> dict[str, float]:
    """measured: bandwidth (bytes/s), peak (operations/s), decode_tok_s at about `context` tokens, prefill_s of `prompts`
    prompts of `prompt_tokens`, tok_s_32, and if transformers ran, transformers_tok_s and transformers_32_tok_s."""
    floor = decode_seconds(shape, int(measured["context"]), measured["bandwidth"])
    lengths = [int(measured["prompt_tokens"])] * int(measured["prompts"])
    found = {
        "decode_of_floor": measured["decode_tok_s"] * floor,
        "prefill_of_peak": prefill_operations(shape, lengths) / measured["prefill_s"] / measured["peak"],
    }
    if "transformers_tok_s" in measured:
        found["against_transformers"] = measured["tok_s_32"] / measured["transformers_tok_s"]
    if "transformers_32_tok_s" in measured:
        found["against_batch"] = measured["tok_s_32"] / measured["transformers_32_tok_s"]
    return found


def table(measured: dict[str, float], found: dict[str, float]) -> list[str]:
    """Markdown: targets first, then everything that was measured."""
    lines = ["| target | set | reached | |", "|---|---|---|---|"]
    for target in TARGETS:
        value = found.get(target.key)
        reached = NOT_MEASURED if value is None else f"{value:.2f}"
        verdict = "" if value is None else "met" if value >= target.least else "MISSED"
        lines.append(f"| {target.title} | {target.least:g} | {reached} | {verdict} |")
    if "against_batch" in found:
        lines += ["", f"Against transformers with all 32 in one batch: {found['against_batch']:.2f}x."]
    lines += ["", "| measured | |", "|---|---|"]
    return lines + [f"| {name} | {value:,.6g} |" for name, value in measured.items()]


def page(
    title: str, about: str, tests: str, measured: dict[str, float], shape: Shape | None, note: str
) -> str:
    """The whole page. shape: None where nothing was measured; `note` says why."""
    found = {} if shape is None else figures(shape, measured)
    lines = [f"# {title}", "", about, "", f"Tests: {tests}", "", *table(measured, found)]
    return "\n".join([*lines, *(["", note] if note else [])]) + "\n"
