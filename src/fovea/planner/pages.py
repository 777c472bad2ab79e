"""The tables of docs/planner-hardware.md and docs/engine-advisor.md.

They name the built-in devices, the engines with every rule, and the source of each figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from fovea.core.settings import settings_of
from fovea.planner.advisor import Rule, Situation, advise, known_advice
from fovea.planner.hardware import FIGURES, GIB, GIGA, TERA, Hardware, known_hardware


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, without a line break at the end. A `|` in a cell is escaped."""
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]
    return "\n".join(lines)


def number(value: float) -> str:
    """Return a number with separators of thousands, and with decimals only if it has any."""
    return f"{value:,.2f}".rstrip("0").rstrip(".")


_TITLES = (
    "device", "memory, GiB", "bandwidth, GB/s", "fp32", "bf16", "fp16", "int8", "fp8", "fp4", "link, GB/s",
    "power, W", "USD per hour", "sources",
)  # fmt: skip
_WORDS = dict(
    zip(FIGURES, ("memory", "bandwidth", "rates", "link", "power", "price", "efficiency"), strict=True)
)


def hardware_markdown() -> str:
    """Return the tables of devices and of their sources as Markdown, without a line break at the end."""
    devices = known_hardware()
    numbers: dict[str, int] = {}
    rows = []
    for device in devices:
        references = []
        for source in device.sources:
            numbers.setdefault(source.url, len(numbers) + 1)
            references.append(str(numbers[source.url]))
        rows.append([*_figures(device), ", ".join(references)])
    notes = [f"- **{device.name}**: {device.note}" for device in devices if device.note]
    return "\n\n".join(
        (table(_TITLES, rows), "\n".join(notes), table(_SOURCE_TITLES, _sources(devices, numbers)))
    )


def _figures(device: Hardware) -> list[str]:
    def rate(kind: str) -> str:
        return number(device.peaks[kind] / TERA) if kind in device.peaks else ""

    link = f"{number(device.link_bandwidth / GIGA)} ({device.link_kind})" if device.link_kind else ""
    return [
        device.name,
        number(device.memory_bytes / GIB),
        number(device.bandwidth / GIGA),
        *(rate(kind) for kind in ("fp32", "bf16", "fp16", "int8", "fp8", "fp4")),
        link,
        "" if device.tdp is None else number(device.tdp),
        "" if device.price is None else f"{device.price:.2f}",
    ]


_SOURCE_TITLES = ("number", "page", "date", "what was read there")


def _sources(devices: tuple[Hardware, ...], numbers: dict[str, int]) -> list[list[str]]:
    """Return the rows of the sources, by number. One page can serve several devices."""
    read: dict[str, list[str]] = {url: [] for url in numbers}
    dates = {}
    for device in devices:
        for source in device.sources:
            dates[source.url] = source.date.isoformat()
            what = ", ".join(_WORDS[figure] for figure in source.figures)
            how = f" ({source.how})" if source.how else ""
            read[source.url].append(f"{device.name}: {what}{how}")
    return [
        [str(index), f"[{urlsplit(url).netloc}]({url})", dates[url], "; ".join(read[url])]
        for url, index in numbers.items()
    ]


SHORT: tuple[tuple[str, Situation], ...] = (
    ("images on an x86 server without a GPU", Situation(device="x86-cpu")),
    ("the same, with follow-up questions", Situation(device="x86-cpu", follow_ups=True)),
    ("the same, with streams that must not stop", Situation(device="x86-cpu", steady_streams=True)),
    ("the same, only engines with years in production", Situation(device="x86-cpu", proven=True)),
    ("a server with an ARM CPU", Situation(device="arm-cpu")),
    ("one NVIDIA GPU", Situation()),
    ("one NVIDIA GPU, as many tokens per second as possible", Situation(aim="throughput")),
    ("one NVIDIA GPU, the shortest times", Situation(aim="latency")),
    ("one NVIDIA GPU, many questions about the same image", Situation(follow_ups=True)),
    ("several NVIDIA GPUs for one model", Situation(several_devices=True)),
    ("one NVIDIA GPU with LoRA adapters", Situation(lora=True)),
    ("one NVIDIA GPU, a checkpoint in AWQ or GPTQ", Situation(checkpoint="awq")),
    ("one NVIDIA GPU, a checkpoint in FP8", Situation(checkpoint="fp8")),
    ("an AMD GPU", Situation(device="amd-gpu")),
    ("a GGUF file on an x86 server", Situation(device="x86-cpu", checkpoint="gguf")),
    ("a Mac", Situation(device="apple")),
    ("a GPU of Intel", Situation(device="intel-gpu")),
    ("an NPU of Intel", Situation(device="intel-npu")),
    ("a browser", Situation(device="browser")),
    ("a phone", Situation(device="mobile")),
)
"""Common situations in words, and what they are for the advisor."""


def advice_markdown() -> str:
    """Return the tables of engines and rules as Markdown, without a line break at the end."""
    engines, rules = known_advice()
    parts = [
        table(
            ("engine", "licence", "OpenAI's API", "what it is", "models"),
            [
                (engine.name, engine.licence, "yes" if engine.openai_api else "no", engine.note,
                 f"{_link(engine.url)}, {engine.date}")
                for engine in engines
            ],
        )
    ]  # fmt: skip
    for engine in engines:
        own = [rule for rule in rules if rule.engine == engine.name]
        rows = [(_when(rule), _points(rule), rule.reason, f"{_link(rule.url)}, {rule.date}") for rule in own]
        parts += [f"### {engine.name}", table(("if", "points", "reason", "source"), rows)]
    return "\n\n".join(parts)


def _when(rule: Rule) -> str:
    """Return the conditions in words, such as "`device` is x86-cpu; `follow_ups`"."""
    shown = [
        f"`{name}`" if accepted == (True,) else f"`{name}` is {' or '.join(map(str, accepted))}"
        for name, accepted in rule.when.items()
    ]
    return "; ".join(shown) or "always"


def _points(rule: Rule) -> str:
    return "ruled out" if rule.rules_out else f"{rule.points:+d}" if rule.points else "0"


def _link(url: str) -> str:
    """Return a link; paths without a protocol are files of the repository, as seen from its docs folder."""
    if url.startswith("http"):
        return f"[{urlsplit(url).netloc}]({url})"
    target = url.removeprefix("docs/") if url.startswith("docs/") else f"../{url}"
    return f"[{url.rpartition('/')[2]}]({target})"


def situation_rows() -> str:
    """Return the rows of the table of the fields of a situation, without titles."""
    rows = []
    for entry in settings_of(Situation):
        values = entry.rule.accepted or ("true, false" if entry.hint is bool else "text")
        rows.append(f"| `{entry.name}` | {values} | {entry.rule.help} |")
    return "\n".join(rows)


def short_table() -> str:
    """Return a Markdown table of common situations, with the engines that are best in each and the next."""
    rows = []
    for words, situation in SHORT:
        found = advise(situation)
        others = [one for one in found.ranked if not one.ruled_out and one.engine.name not in found.best]
        second = [one.engine.name for one in others if one.points == others[0].points]
        best = ", ".join(found.best) + (" (a tie)" if found.tie else "")
        rows.append((words, best, ", ".join(second) or "none"))
    return table(("situation", "best", "next"), rows)
