"""The tables of docs/planner-hardware.md and docs/engine-advisor.md that follow from the planner's data.

python -m tools.planner_pages
"""

from __future__ import annotations

from fovea.core.markdown import markdown_table
from fovea.core.precision import KV_COMPUTE, TABLE, Speed
from fovea.core.settings import settings_of
from fovea.planner.advisor import Situation, advise
from fovea.planner.hardware import GIB, GIGA, TERA, Hardware, known_hardware

_TITLES = (
    "device", "capability", "memory, GiB", "bandwidth, GB/s", "fp32", "bf16", "fp16", "int8", "fp8", "fp4",
    "link, GB/s", "power, W", "USD per hour", "sources",
)  # fmt: skip
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


def hardware_table() -> str:
    """Return the table of the built-in devices. The last column numbers the pages that are sources."""
    numbers: dict[str, int] = {}
    rows = []
    for device in known_hardware():
        own = [str(numbers.setdefault(source.url, len(numbers) + 1)) for source in device.sources]
        rows.append([*_figures(device), ", ".join(own)])
    return markdown_table(_TITLES, rows)


def _figures(device: Hardware) -> list[str]:
    def rate(kind: str) -> str:
        return number(device.peaks[kind] / TERA) if kind in device.peaks else ""

    link = f"{number(device.link_bandwidth / GIGA)} ({device.link_kind})" if device.link_kind else ""
    return [
        device.name,
        device.capability,
        number(device.memory_bytes / GIB),
        number(device.bandwidth / GIGA),
        *(rate(kind) for kind in ("fp32", "bf16", "fp16", "int8", "fp8", "fp4")),
        link,
        "" if device.tdp is None else number(device.tdp),
        "" if device.price is None else f"{device.price:.2f}",
    ]


def precision_table() -> str:
    """Return the table of types of weights by device, with their speeds."""
    kinds = {"cuda": "NVIDIA GPU", "rocm": "GPU of AMD", "cpu": "CPU"}

    def place(row: Speed) -> str:
        if row.compute > (0, 0):
            return f"{kinds[row.kind]} from {row.compute[0]}.{row.compute[1]} on"
        return f"{kinds[row.kind]}, {', '.join(row.sets)}" if row.sets else kinds[row.kind]

    rows = [
        (
            f"`{row.weights}`", place(row), f"{row.few:g}", f"{row.many:g}",
            ", ".join(row.measured) or "no listed device", row.source,
        )
        for row in TABLE
    ]  # fmt: skip
    titles = ("weights", "device", "few rows", "many rows", "measured on", "source")
    return markdown_table(titles, rows)


def kv_sentence() -> str:
    """Return which GPUs keys and values in 8 bits need."""
    least = [
        f"`{name}`: {'every device' if compute == (0, 0) else f'GPUs from {compute[0]}.{compute[1]} on'}"
        for name, compute in KV_COMPUTE.items()
    ]
    return f"Keys and values in 8 bits (`kv_dtype`) with the kernels `auto`: {'; '.join(least)}."


def number(value: float) -> str:
    """Return a number with separators of thousands, and with decimals only if it has any."""
    return f"{value:,.2f}".rstrip("0").rstrip(".")


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
    return markdown_table(("situation", "best", "next"), rows)


if __name__ == "__main__":
    print("\n\n".join((hardware_table(), precision_table(), kv_sentence(), situation_rows(), short_table())))
