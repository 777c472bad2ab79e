"""Steps, lower bounds, targets and the Markdown pages of `benchmarks/gpu.py`.

It does not import torch, so tests run anywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # the tree is used without an installation
from fovea.core.markdown import markdown_table

IN_MEMORY = Path("/dev/shm/fovea-bench")
"""Folder of the checkpoint if it is written to memory. It is removed after the measurement."""
NOT_MEASURED = "not yet measured"
FAILURE_CHARACTERS = 8000
"""Longest text of failures on the page. The files with results have all of it."""
TITLES = {
    "bandwidth": "memory bandwidth, bytes/s",
    "peak": "matrix rate, operations/s",
    "decode_tok_s": "decode, one request, tokens/s",
    "context": "its mean context, tokens",
    "tok_s_32": "32 requests with a new image each, tokens/s",
    "first_of_32_s": "earliest first token of these, s",
    "last_of_32_s": "latest first token of these, s",
    "last_of_32_known_images_s": "latest first token with known images, s",
    "speculate_1_at_off_tok_s": "decode, one request, without drafts, tokens/s",
    "speculate_1_at_1.8_tok_s": "the same with three drafts of which 0.8 are right on average",
    "speculate_1_at_2.6_tok_s": "the same with three drafts of which 1.6 are right on average",
    "speculate_8_at_off_tok_s": "one of eight requests, without drafts, tokens/s",
    "speculate_8_at_1.8_tok_s": "the same with three drafts of which 0.8 are right on average",
    "speculate_8_at_2.6_tok_s": "the same with three drafts of which 1.6 are right on average",
    "decode_not_padded_tok_s": "decode, one request, steps not padded to eight rows, tokens/s",
    "decode_tok_s_of_32": "one of the 32 after its first token, median, tokens/s",
    "encoder_one_ms": "encoder: one image of 5,184 patches, ms",
    "encoder_one_host_ms": "the time to launch it, ms",
    "encoder_small_ms": "encoder: 16 images of 1,024 patches together, ms",
    "encoder_small_host_ms": "the time to launch them, ms",
    "encoder_single_ms": "encoder: one image of 1,024 patches, ms",
    "step_32_ms": "a decode step of 32 requests, ms",
    "step_256_ms": "a decode step of 256 requests, ms",
    "gap_median_ms": "between two tokens of a stream, median, ms",
    "gap_while_image_arrives_ms": "the longest gap while another request's new image is encoded, ms",
    "prefill_s": "prefill of all prompts, s",
    "prompts": "number of these prompts",
    "prompt_tokens": "tokens of each prompt",
    "visual_tokens": "visual tokens of each prompt",
    "transformers_tok_s": "transformers, one request after the other, tokens/s",
    "transformers_32_tok_s": "transformers, all 32 in one batch, tokens/s",
    "chunks_gathered_ms": "one layer's attention of chunks of prompts over gathered keys, ms",
    "chunks_flashinfer_ms": "the same by FlashInfer, ms",
}
"""Names of the figures on the page, with their units."""


@dataclass(frozen=True)
class Step:
    """A part of the measurement.

    name: name of the step, as in gpu_speed.py.
    seconds: time after which it is ended.
    """

    name: str
    seconds: float


STEPS = (
    Step("limits", 40), Step("checkpoint", 90), Step("engine", 90), Step("decode", 40),
    Step("speculate", 40), Step("crowd", 40),
    Step("encoder", 30), Step("batches", 40), Step("arrival", 20), Step("prefill", 40),
    Step("transformers", 110), Step("transformers_32", 60), Step("chunks", 20),
)  # fmt: skip
"""In order of worth: if the time ends, the last ones are missing."""


@dataclass
class Outcome:
    """The end of a step.

    step: its name.
    seconds: how long it took.
    error: reason why it gave no figures; empty: it did.
    measured: its figures.
    shape: fields of Shape, if the step knows them.
    ended: its process ended, too, so that the next step needs a new one.
    """

    step: str
    seconds: float = 0.0
    error: str = ""
    measured: dict[str, float] = field(default_factory=dict)
    shape: dict[str, int] = field(default_factory=dict)
    ended: bool = False


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
    Target("decode, one request: share of the rate that memory bandwidth allows", "decode_of_bound", 0.7),
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


def figures(shape: Shape | None, measured: dict[str, float]) -> dict[str, float]:
    """The ratios that targets refer to, as far as the steps for them gave figures.

    measured: bandwidth (bytes/s), peak (operations/s), decode_tok_s at about `context` tokens, prefill_s of
        `prompts` prompts of `prompt_tokens` tokens, tok_s_32, transformers_tok_s and transformers_32_tok_s.
        Other keys are only shown: first_of_32_s, last_of_32_s, last_of_32_known_images_s, decode_tok_s_of_32,
        visual_tokens, chunks_gathered_ms and chunks_flashinfer_ms.
    """
    ratios = {}
    if shape and measured.keys() >= {"bandwidth", "decode_tok_s"}:
        bound = decode_seconds(shape, int(measured["context"]), measured["bandwidth"])
        ratios["decode_of_bound"] = measured["decode_tok_s"] * bound
    if shape and measured.keys() >= {"peak", "prefill_s"}:
        lengths = [int(measured["prompt_tokens"])] * int(measured["prompts"])
        operations = prefill_operations(shape, lengths)
        ratios["prefill_of_peak"] = operations / measured["prefill_s"] / measured["peak"]
    for name, theirs in (
        ("against_transformers", "transformers_tok_s"),
        ("against_batch", "transformers_32_tok_s"),
    ):
        if measured.keys() >= {"tok_s_32", theirs}:
            ratios[name] = measured["tok_s_32"] / measured[theirs]
    return ratios


def numbers_page(title: str, about: str, outcomes: Sequence[Outcome]) -> str:
    """The page of the measurement: targets first, then all figures, and how each step ended."""
    measured = {name: value for outcome in outcomes for name, value in outcome.measured.items()}
    shape = next((Shape(**outcome.shape) for outcome in outcomes if outcome.shape), None)
    ratios = figures(shape, measured)
    rows = []
    for target in TARGETS:
        value = ratios.get(target.key)
        reached = NOT_MEASURED if value is None else f"{value:.2f}"
        verdict = "" if value is None else "met" if value >= target.least else "MISSED"
        rows.append((target.title, f"{target.least:g}", reached, verdict))
    lines = [f"# {title}", "", about, "", markdown_table(("target", "set", "reached", ""), rows)]
    if "against_batch" in ratios:
        lines += ["", f"Against transformers with all 32 in one batch: {ratios['against_batch']:.2f}x."]
    values = [(TITLES.get(name, name), f"{value:,.6g}") for name, value in measured.items()]
    steps = [
        (each.step, f"{each.seconds:.1f}", (each.error.strip() or "done").splitlines()[-1])
        for each in outcomes
    ]
    lines += ["", markdown_table(("measured", ""), values)]
    lines += ["", markdown_table(("step", "seconds", ""), steps)]
    return "\n".join(lines) + "\n"


def correctness_page(
    title: str, about: str, end: str, collected: Sequence[str], lines_of_results: Sequence[dict[str, str]]
) -> str:
    """The page of the tests: counts, tests without a result, and the text of each failure.

    end: how pytest ended.
    lines_of_results: "test", "outcome" and "text". A test may have two, if it fails when it is cleaned up, or
        if its process ends. Then a failure counts.
    """
    by_test: dict[str, dict[str, str]] = {}
    for line in lines_of_results:
        if by_test.get(line["test"], {}).get("outcome") != "failed":
            by_test[line["test"]] = line
    results = list(by_test.values())
    counts = {
        outcome: sum(result["outcome"] == outcome for result in results)
        for outcome in ("passed", "failed", "skipped")
    }
    missing = [name for name in collected if name not in by_test]
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    lines = [f"# {title}", "", about, "", f"Tests: {told}, {len(missing)} without a result; {end}"]
    lines += ["", *(f"- no result: {name}" for name in missing)] if missing else []
    reasons = {result["text"] for result in results if result["outcome"] == "skipped"}
    lines += ["", *(f"- skipped: {reason}" for reason in sorted(reasons))] if reasons else []
    failures = [result for result in results if result["outcome"] == "failed"]
    each = FAILURE_CHARACTERS // max(1, len(failures))
    for result in failures:
        lines += ["", f"## {result['test']}", "", "```", result["text"][-each:], "```"]
    return "\n".join(lines) + "\n"
