"""Judge the results of benchmarks/speculation.py by its targets, and print them as Markdown and as a "
"chart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fovea.bench.plot import figure, save
from fovea.core.markdown import markdown_table
from relevance_page import WORDS, Verdict
from speculation_runs import ALL, ALL_DRAFTERS, ALWAYS, OFF

Body = Mapping[str, Any]
"""Results by section, as in speculation.json: tiny, crowd, real, large. A section may be missing."""
SECTIONS = ("tiny", "crowd", "real", "large")
LEAST_ALL, LEAST_READING, LEAST_SUMMARY = 1.5, 1.8, 1.5
LEAST_SPEED, AT_TOKENS, AT_DRAFTS = 1.35, 1.8, 3
MOST_LATE, MOST_LOSS = 0.02, 0.02
NOT_HERE = "Not measured here."
GLOSSARY = "\n".join(
    (
        "- **Tokens per step**: the tokens of an answer after its first, over the steps that decoded it. "
        "Steps of the prompt and of images do not count.",
        "- **Speed**: tokens per second of one stream from its first token to its last, over those with "
        "speculation off. Both sides take turns with every question; of each answer the median time counts. "
        "In parentheses the 95% interval of a bootstrap over questions.",
        "- **First token**: the time to it over that with speculation off, the median over conversations.",
        "- Every answer was compared with that of speculation off: all tokens and all their log "
        "probabilities are equal.",
    )
)


def verdicts(body: Body) -> list[Verdict]:
    return [
        *_tiny_verdicts(body.get("tiny")),
        _summaries(body.get("real")),
        *_large_verdicts(body.get("large")),
    ]


def _tiny_verdicts(tiny: Body | None) -> Iterator[Verdict]:
    earlier = f"{tiny['earlier']:,}" if tiny else "2,800"
    target = f"fovea-tiny, all kinds, all drafters, {earlier} earlier answers: >= {LEAST_ALL} tokens per step"
    found = _cell(tiny, ALL, ALL_DRAFTERS)
    yield _least(target, found["tokens_per_step"] if found else None, LEAST_ALL)
    target = f"fovea-tiny, reading, draft layer in every step: >= {LEAST_READING} tokens per step"
    found = _cell(tiny, "reading", ALWAYS)
    yield _least(target, found["tokens_per_step"] if found else None, LEAST_READING)
    target = f"fovea-tiny, all drafters: first token at most {100 * MOST_LATE:g}% later"
    found = _cell(tiny, ALL, "auto")
    if found is None:
        yield Verdict(target, "-", None)
    else:
        ratio = found["first"]
        yield Verdict(target, _signed(ratio), ratio["value"] <= 1 + MOST_LATE)


def _summaries(real: Body | None) -> Verdict:
    target = f"SmolLM2, summaries, drafts from texts: >= {LEAST_SUMMARY} tokens per step"
    values = {name: _cell(real, "summary", name) for name in ("prompt", "answers")}
    known = {name: cell["tokens_per_step"] for name, cell in values.items() if cell is not None}
    if not known:
        return Verdict(target, "-", None)
    words = ", ".join(f"{name} {value:.2f}" for name, value in known.items())
    return Verdict(target, words, max(known.values()) >= LEAST_SUMMARY)


def _large_verdicts(large: Body | None) -> Iterator[Verdict]:
    target = (
        f"0.5 B, one stream, drafts right so often that {AT_TOKENS} tokens per step result: "
        f">= {LEAST_SPEED}x tokens per second"
    )
    cells = large["one"] if large else []
    cell = next((c for c in cells if (c["drafts"], c["goal"]) == (AT_DRAFTS, AT_TOKENS)), None)
    if cell is None:
        yield Verdict(target, "-", None)
    else:
        found = cell["budget"]
        words = f"{_ratio(found['speed'])} at {found['tokens_per_step']:.2f} tokens per step"
        yield Verdict(target, words, found["speed"]["value"] >= LEAST_SPEED)
    target = f"0.5 B, 8 streams, bad drafts: at most {100 * MOST_LOSS:g}% fewer tokens per second"
    if large is None:
        yield Verdict(target, "-", None)
    else:
        ratio = large["crowd"]["ratio"]
        yield Verdict(target, _signed(ratio), ratio["value"] >= 1 - MOST_LOSS)


def _least(target: str, value: float | None, least: float) -> Verdict:
    return Verdict(target, "-", None) if value is None else Verdict(target, f"{value:.2f}", value >= least)


def _cell(section: Body | None, kind: str, name: str) -> dict[str, Any] | None:
    found = section["kinds"].get(kind, {}).get(name) if section else None
    return found


def _ratio(ratio: Mapping[str, float]) -> str:
    return f"{ratio['value']:.2f} ({ratio['low']:.2f} - {ratio['high']:.2f})"


def _signed(ratio: Mapping[str, float]) -> str:
    value, low, high = (100 * (ratio[name] - 1) for name in ("value", "low", "high"))
    return f"{value:+.1f}% ({low:+.1f} to {high:+.1f})"


def page(body: Body, chart: str) -> str:
    """The Markdown text of all results. chart: path of the chart, relative to the page."""
    rows = [[one.target, one.result, WORDS[one.met]] for one in verdicts(body)]
    return "\n\n".join(
        (
            "# Speculation, measured",
            "`make bench-speculation` measures whether drafts make answers faster "
            "([docs/speculation.md](../../docs/speculation.md)). `--only` repeats single sections; "
            "each says when "
            "and where it was measured.",
            _table(["target", "result", ""], rows),
            GLOSSARY,
            f"![tokens per step, and speed]({chart})",
            "## Questions about scenes, one stream",
            _tiny(body["tiny"]) if "tiny" in body else NOT_HERE,
            "## Questions about scenes, eight streams",
            _crowd(body["crowd"]) if "crowd" in body else NOT_HERE,
            "## A pretrained decoder",
            _real(body["real"]) if "real" in body else NOT_HERE,
            "## Drafts of a chosen acceptance",
            _large(body["large"]) if "large" in body else NOT_HERE,
        )
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(titles, rows, aligned=True)


def _head(section: Body) -> str:
    return f"{section['machine']}; this section took {section['minutes']:.1f} minutes."


def _tiny(tiny: Body) -> str:
    names: list[str] = tiny["names"]
    missing = "" if "layer" in names else " The model has no draft layer here."
    return "\n\n".join(
        (
            f"{_head(tiny)} {tiny['model']}, {tiny['conversations']:,} held-out conversations, each asked "
            f"{tiny['passes']} times, one answer at a time. The drafters `answers`, `all of them` and `auto` "
            f"begin with the right answers of {tiny['earlier']:,} questions of a training seed. These "
            "were put "
            "into the store directly, and no answer of the measurement is added: the store would know "
            "a question "
            "that is asked again. Answers about the same image are forgotten before each conversation. "
            "`form` has a JSON Schema, and the tokens that it forces are drafts without speculation, "
            f"too. `{ALWAYS}` drafts with the layer in every step, also where that does not pay. "
            f"`auto` are all drafters, as long as looking for drafts takes at most 2% of a step.{missing}",
            "Over all kinds:",
            _over_all(tiny),
            "Tokens per step:",
            _per_kind(tiny, names, lambda cell: f"{cell['tokens_per_step']:.2f}"),
            "Speed:",
            _per_kind(tiny, names[1:], lambda cell: _ratio(cell["speed"])),
        )
    )


def _over_all(section: Body) -> str:
    rows = []
    for name in section["names"]:
        cell = section["kinds"][ALL][name]
        drafts = section["drafts"].get(name)
        computed = drafts["draft_tokens"] if drafts else 0
        rows.append(
            [
                name,
                f"{cell['tokens_per_step']:.2f}",
                f"{cell['tokens_per_s']:.0f}",
                "1" if name == OFF else _ratio(cell["speed"]),
                "1" if name == OFF else _signed(cell["first"]),
                f"{computed:.0f}" if drafts else "-",
                f"{100 * drafts['accepted_draft_tokens'] / computed:.0f}%" if drafts and computed else "-",
                f"{drafts['drafts_left_out']:.0f}" if drafts else "-",
            ]
        )
    titles = [
        "drafter", "tokens per step", "tokens/s", "speed", "first token", "drafts computed", "accepted",
        "left out",
    ]  # fmt: skip
    return _table(titles, rows)


def _per_kind(section: Body, names: Sequence[str], show: Any) -> str:
    rows = []
    for kind, cells in section["kinds"].items():
        first = next(iter(cells.values()))
        rows.append(
            [kind, f"{first['answers']}", f"{first['tokens']:.1f}", *(show(cells[name]) for name in names)]
        )
    return _table(["kind", "answers", "tokens each", *names], rows)


def _crowd(crowd: Body) -> str:
    rates = crowd["rates"]
    rows = [[name, f"{_median(rates[name]):.0f}", _spread(rates[name])] for name in rates]
    taken = crowd["drafts"]
    return "\n\n".join(
        (
            f"{_head(crowd)} {crowd['model']}, {crowd['questions']} questions, {crowd['streams']} at a time, "
            f"{crowd['repeats']} rounds of each side in turn. Images and prompts are known from a round "
            "before, so "
            "nearly all of the time is decoding.",
            _table(["speculation", "tokens/s", "rounds"], rows),
            f"Ratio: {_ratio(crowd['ratio'])} (95%, bootstrap over rounds). {taken['draft_tokens']:.0f} "
            "drafts were "
            f"computed, {taken['accepted_draft_tokens']:.0f} accepted; {taken['drafts_left_out']:.0f} "
            "more were "
            "found, and were not worth their rows.",
        )
    )


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.0f} - {max(values):.0f}"


def _real(real: Body) -> str:
    names: list[str] = real["names"]
    timed = [name for name in names if name not in (OFF, "model")]
    return "\n\n".join(
        (
            f"{_head(real)} {real['model']} in bf16, {real['questions']} questions "
            f"(benchmarks/speculation_texts.py), up to {real['answer']} tokens each. `answers` begins "
            "with the "
            "answers to as many questions about the same things in other words, and gets no further ones. "
            "`model` is the same model with int4 weights. It shows how often such drafts are right; it "
            "is as large "
            "as the model itself, so its speed says nothing.",
            "Tokens per step:",
            _per_kind(real, names, lambda cell: f"{cell['tokens_per_step']:.2f}"),
            "Speed:",
            _per_kind(real, timed, lambda cell: _ratio(cell["speed"])),
            "Over all kinds:",
            _over_all(real),
        )
    )


def _large(large: Body) -> str:
    rows_ms, crowd = large["rows_ms"], large["crowd"]
    one = rows_ms[OFF]
    costs = [[name, f"{ms:.1f}", f"{ms / one:.2f}"] for name, ms in rows_ms.items()]
    streams = [
        [
            str(cell["drafts"]),
            f"{cell['goal']}",
            *(
                value
                for name in ("budget", "every")
                for value in (f"{cell[name]['tokens_per_step']:.2f}", _ratio(cell[name]["speed"]))
            ),
        ]
        for cell in large["one"]
    ]
    planned = [
        [
            str(cell["drafts"]), f"{cell['acceptance']:.2f}", f"{cell['tokens_per_step']:.2f}",
            f"{cell['predicted']:.2f}", f"{cell['measured']:.2f}",
            f"{cell['predicted'] / cell['measured']:.2f}",
        ]
        for cell in large["planned"]
    ]  # fmt: skip
    return "\n\n".join(
        (
            f"{_head(large)} Random weights in the shape of a 0.5 B Qwen2.5-VL, bf16. A drafter knows "
            "the answers, "
            "and errs with a chosen probability.",
            f"Milliseconds of a step with so many rows of one answer ({large['repeats']} repeats, "
            "medians). `off` "
            "is a step without speculation:",
            _table(["rows", "ms", "over off"], costs),
            f"One stream, {large['tokens']} tokens, speed against off "
            f"({_median([cell['off_tokens_per_s'] for cell in large['one']]):.1f} tokens per second). "
            "*Chosen*: the engine "
            "computes as many "
            "drafts as it holds to be worth their rows. *All*: it computes all of them.",
            _table(
                ["drafts", "meant for", "chosen: tokens per step", "speed", "all: tokens per step", "speed"],
                streams,
            ),
            f"{crowd['streams']} streams, off "
            f"{_median(crowd['rates'][OFF]):.1f} tokens per second. With drafts of which one in ten is "
            "right, "
            f"though the drafter claims nine: ratio {_ratio(crowd['ratio'])}; {crowd['drafts']:.0f} "
            "drafts were "
            "computed.",
            "The planner's formula (`fovea.planner.option.speculation`) with the milliseconds of the "
            "first table "
            "and the measured acceptance, beside the measured speed where all drafts are computed:",
            _table(
                ["drafts", "acceptance", "tokens per step", "predicted", "measured", "predicted / measured"],
                planned,
            ),
        )
    )


def draw(path: Path, body: Body) -> None:
    """Draw tokens per step of each kind and drafter, and the speed of the large model by tokens per step."""
    groups = [name for name in ("tiny", "real") if name in body]
    count = max(1, len(groups) + ("large" in body))
    chart = figure(14, 4.2 * count)
    panels = chart.subplots(count, 1, squeeze=False)[:, 0]
    for axes, name in zip(panels, groups, strict=False):
        _bars(axes, body[name], body[name]["model"])
    if "large" in body:
        _lines(panels[-1], body["large"])
    save(chart, path)


def _bars(axes: Any, section: Body, title: str) -> None:
    names, kinds = section["names"], list(section["kinds"])
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        heights = [section["kinds"][kind][name]["tokens_per_step"] for kind in kinds]
        axes.bar(
            [number + width * (place - (len(names) - 1) / 2) for number in range(len(kinds))],
            heights, width, label=name,
        )  # fmt: skip
    axes.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_ylabel("tokens per step")
    axes.set_title(title)
    axes.legend(ncols=len(names))


def _lines(axes: Any, large: Body) -> None:
    for name, words, marker in (("budget", "chosen drafts", "o"), ("every", "all drafts", "s")):
        for drafts in dict.fromkeys(cell["drafts"] for cell in large["one"]):
            cells = [cell[name] for cell in large["one"] if cell["drafts"] == drafts]
            axes.plot(
                [cell["tokens_per_step"] for cell in cells],
                [cell["speed"]["value"] for cell in cells],
                marker=marker, label=f"{words}, {drafts}",
            )  # fmt: skip
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("tokens per step")
    axes.set_ylabel("speed against off")
    axes.set_title("random 0.5 B, one stream")
    axes.legend(ncols=4)
