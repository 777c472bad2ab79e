"""The table of docs/planner-hardware.md: the built-in devices, and the source of each figure."""

from __future__ import annotations

from urllib.parse import urlsplit

from fovea.planner.hardware import Hardware
from fovea.planner.hardware_file import FIGURES, GIB, GIGA, TERA, known_hardware
from fovea.planner.markdown import number, table

_TITLES = (
    "device", "memory, GiB", "bandwidth, GB/s", "fp32", "bf16", "fp16", "int8", "fp8", "fp4", "link, GB/s",
    "power, W", "USD per hour", "sources",
)  # fmt: skip
_WORDS = dict(
    zip(FIGURES, ("memory", "bandwidth", "rates", "link", "power", "price", "efficiency"), strict=True)
)


def markdown() -> str:
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
